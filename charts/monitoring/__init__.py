"""Rules, alerts and dashboards of the chart, as code.

`make dashboards` writes them to `charts/finetune-operator/files`; `make check` fails where those
files differ. Every metric and label that a query names is looked up in the catalogue.
"""
