// Search the site with the code that runs in a reader's browser: the worker of the theme.
//
//     node site_search.cjs WORKER.js search.json < questions.json
//
// Reads a JSON list of questions, and writes the locations of the first ten hits of each.
"use strict";
const fs = require("node:fs");
const vm = require("node:vm");

const [worker, index] = process.argv.slice(2);
const questions = JSON.parse(fs.readFileSync(0, "utf8"));
const { items } = JSON.parse(fs.readFileSync(index, "utf8"));
const [SETUP, QUERY, RESULT] = [0, 2, 3]; // types of the worker's messages

let receive;
const self = { postMessage: (message) => receive(message) };
vm.runInNewContext(fs.readFileSync(worker, "utf8"), { self, Intl });
const send = (type, data) =>
  new Promise((resolve) => {
    receive = resolve;
    self.onmessage({ data: { type, data } });
  });

(async () => {
  await send(SETUP, JSON.parse(fs.readFileSync(index, "utf8")));
  const found = [];
  for (const input of questions) {
    const { type, data } = await send(QUERY, { input });
    if (type !== RESULT) throw new Error(`the worker cannot search for ${input}`);
    found.push(data.items.map(({ id }) => items[id].location));
  }
  process.stdout.write(JSON.stringify(found));
})();
