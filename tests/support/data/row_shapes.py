"""Shapes of rows that are published, each with the reading or the question that is due."""

import json
from typing import Any

import pytest

QUESTION = "How do I reset my password?"
RESPONSE = "Open Settings, choose Security, and press Reset."
LONG = "The router has a blue light that blinks twice when the line is down."
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": RESPONSE}]
SHARED = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": RESPONSE}]
TOOL = {"name": "find", "description": "Find a page.", "parameters": {"type": "object"}}
TEMPLATED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{RESPONSE}<|im_end|>"
CHAT, INSTRUCTION, TEXT = "chat", "instruction", "text"


def read(row: dict[str, Any], shape: str, columns: str = "", unread: str = "") -> Any:
    """A row, the format, `field=column` for other names, and the columns that are not read."""
    return pytest.param([row] * 3, shape, columns, unread, id=" ".join(row)[:60])


DETECTED = [
    read({"messages": TURNS}, CHAT),
    read({"messages": TURNS, "id": 7, "source": "forum", "topic": "login"}, CHAT, "",
        "id source topic"),
    read({"conversations": SHARED, "id": "a-1"}, CHAT, "", "id"),
    read({"conversations": SHARED, "system": "Be brief.", "tools": json.dumps([TOOL])}, CHAT),
    read({"messages": TURNS, "tools": [TOOL]}, CHAT),
    read({"prompt": QUESTION, "messages": TURNS, "prompt_id": "f3"}, CHAT, "", "prompt prompt_id"),
    read({"conversation": TURNS}, CHAT, "messages=conversation"),
    read({"dialogue": SHARED, "turns": 2}, CHAT, "messages=dialogue", "turns"),
    read({"messages": TURNS, "score": 3.5, "metadata": {"lang": "en"}}, CHAT, "", "score metadata"),
    read({"messages": TURNS, "system_message": "Be brief."}, CHAT, "system=system_message"),
    read({"messages": [{"role": "system", "content": "Be brief."}, *TURNS], "label": "faq"}, CHAT,
        "", "label"),
    read({"prompt": QUESTION, "completion": RESPONSE}, CHAT),
    read({"prompt": TURNS[:1], "completion": TURNS[1:]}, CHAT),
    read({"prompt": QUESTION, "response": RESPONSE}, CHAT, "completion=response"),
    read({"question": QUESTION, "answer": RESPONSE}, CHAT, "prompt=question,completion=answer"),
    read({"question": QUESTION, "answer": "42", "source": "https://a.example/b"}, CHAT,
         "prompt=question,completion=answer", "source"),
    read({"query": QUESTION, "response": RESPONSE}, CHAT, "prompt=query,completion=response"),
    read({"input": QUESTION, "output": RESPONSE}, CHAT, "prompt=input,completion=output"),
    read({"problem": QUESTION, "solution": RESPONSE}, CHAT, "prompt=problem,completion=solution"),
    read({"system": "Be brief.", "user": QUESTION, "assistant": RESPONSE}, CHAT,
         "prompt=user,completion=assistant"),
    read({"user": "u123", "prompt": QUESTION, "completion": RESPONSE}, CHAT, "", "user"),
    read({"Question": QUESTION, "Answer": RESPONSE}, CHAT, "prompt=Question,completion=Answer"),
    read({"question": "怎么重置密码", "answer": "打开设置。"}, CHAT,
         "prompt=question,completion=answer"),
    read({"prompt": QUESTION, "completion": RESPONSE, "train": 1}, CHAT),
    read({"instruction": QUESTION, "input": "", "output": RESPONSE}, INSTRUCTION),
    read({"instruction": QUESTION, "input": LONG, "output": RESPONSE,
          "text": f"Below is a task.\n\n{QUESTION}\n{LONG}\n{RESPONSE}"}, INSTRUCTION, "", "text"),
    read({"instruction": QUESTION, "context": LONG, "response": RESPONSE, "category": "closed_qa"},
         INSTRUCTION, "input=context,output=response", "category"),
    read({"instruction": QUESTION, "output": RESPONSE, "system": "Be brief.",
          "history": [["Hello there", "Hello"]]}, INSTRUCTION),
    read({"instruction": QUESTION, "response": RESPONSE}, INSTRUCTION, "output=response"),
    read({"question": QUESTION, "context": LONG, "answer": RESPONSE}, INSTRUCTION,
         "instruction=question,input=context,output=answer"),
    read({"text": LONG}, TEXT),
    read({"text": LONG, "url": "https://a.example", "timestamp": "2026-01-01", "score": 0.9}, TEXT,
         "", "url timestamp score"),
    read({"text": LONG, "meta": {"set": "books"}}, TEXT, "", "meta"),
    read({"title": "Router lights", "content": LONG}, TEXT, "text=content", "title"),
]  # fmt: skip


def ask(row: dict[str, Any], reason: str, *options: str) -> Any:
    """A row, a part of the question, and the readings that it offers."""
    return pytest.param([row] * 3, reason, options, id=" ".join(row)[:60])


ASKED = [
    ask({"question": QUESTION, "answer": RESPONSE, "query": "password reset", "response": LONG},
        "the columns allow 2 readings: question and ",
        "prompt=question,completion=answer", "prompt=query,completion=response"),
    ask({"problem": QUESTION, "solution": LONG, "answer": "42"}, "2 readings: problem and",
        "prompt=problem,completion=answer", "prompt=problem,completion=solution"),
    ask({"prompt": QUESTION, "completion": RESPONSE, "response": LONG}, "2 readings",
        "prompt=prompt,completion=completion", "prompt=prompt,completion=response"),
    ask({"instruction": "Reply as a doctor would.", "question": QUESTION, "answer": RESPONSE},
        "2 readings", "instruction=instruction,output=answer", "prompt=question,completion=answer"),
    ask({"messages": TURNS, "conversations": SHARED}, "2 readings", "messages=messages",
        "messages=conversations"),
    ask({"text": LONG, "content": LONG[:30]}, "2 readings", "text=text", "text=content"),
    ask({"prompt": QUESTION, "chosen": RESPONSE, "rejected": "No."},
        "preference data (chosen, rejected)",
        "prompt=prompt,completion=chosen"),
    ask({"chosen": TURNS, "rejected": TURNS}, "preference data", "messages=chosen"),
    ask({"prompt": QUESTION, "chosen": TURNS, "rejected": TURNS, "messages": TURNS},
        "preference data", "messages=chosen"),
    ask({"chosen": f"\n\nHuman: {QUESTION}", "rejected": "No."}, "preference data", "text=chosen"),
    ask({"prompt": QUESTION, "completion": RESPONSE, "label": False}, "preference data (label)",
        "prompt=prompt,completion=completion"),
    ask({"messages": TURNS, "images": ["a.png"]}, "column images. Only text"),
    ask({"image": "a.png", "text": LONG}, "column image. Only text"),
    ask({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": [1, 2, 3]}, "token ids"),
    ask({"text": LONG, "input_ids": [1, 2, 3]}, "token ids", "text=text"),
    ask({"role": "user", "content": QUESTION}, "a single turn (role, content)", "text=content"),
    ask({"text": TEMPLATED}, "chat template (<|im_start|>)", "text=text"),
    ask({"text": f"<s>[INST] {QUESTION} [/INST] {RESPONSE}</s>"}, "chat template ([INST])",
        "text=text"),
    ask({"text": f"### Instruction:\n{QUESTION}\n\n### Response:\n{RESPONSE}"}, "chat template",
        "text=text"),
    ask({"text": LONG, "label": 1}, "label would not be read", "text=text"),
    ask({"text": LONG, "sentiment": "positive"}, "sentiment would not be read", "text=text"),
    ask({"text": LONG, "summary": "The light blinks twice if the line is down."},
        "summary would not be read", "text=text"),
    ask({"question": QUESTION, "choices": ["yes", "no"], "answer": "A"},
        "choices would not be read",
        "prompt=question,completion=answer"),
    ask({"question": QUESTION, "passage": LONG, "answer": RESPONSE}, "passage would not be read",
        "prompt=question,completion=answer", "instruction=question,input=passage,output=answer"),
    ask({"text": LONG, "question": QUESTION, "answer": RESPONSE}, "text would not be read",
        "prompt=question,completion=answer", "instruction=question,input=text,output=answer"),
    ask({"question": QUESTION, "thinking": LONG, "answer": RESPONSE}, "thinking would not be read",
        "prompt=question,completion=answer", "instruction=question,input=thinking,output=answer"),
    ask({"query": QUESTION, "response": RESPONSE, "history": [["Hello", "Hello"]]},
        "history would not be read", "prompt=query,completion=response"),
    ask({"source": "The house is small.", "target": "Das Haus ist klein."},
        "no column that is known",
        "prompt=source,completion=target", "text=source"),
    ask({"quote": LONG, "number": 3}, "no column that is known", "text=quote"),
    ask({"translation": {"en": "house", "de": "Haus"}}, "no column that is known"),
    ask({"prompt": QUESTION}, "a prompt (prompt), but no response", "text=prompt"),
    ask({"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, "no column that is known"),
    ask({"sentence": LONG, "label": 1}, "no column that is known", "text=sentence"),
]  # fmt: skip
