"""Rules, alerts and dashboards of the chart, as code.

`make dashboards` writes them to `charts/finetune-operator/files`; `make check` fails if those files
are outdated. Every metric and label of a query is checked against the catalogue.
"""
