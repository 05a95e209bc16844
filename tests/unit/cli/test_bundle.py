"""Names and folders that a support bundle replaces."""

import pytest

from finetune_operator.cli.bundle import Bundle, without_values


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        pytest.param("by bob@corp.test (bob)", "by USER (USER)", id="names"),
        pytest.param("bobsled, rebob", "bobsled, rebob", id="parts of words"),
        pytest.param("/home/eve/x /Users/eve: y", "~/x ~: y", id="homes of others"),
        pytest.param("the root cause, an admin", "the root cause, an admin", id="shared accounts"),
        pytest.param("system:node:a", "system:node:a", id="accounts of the cluster"),
    ],
)
def test_names_of_users_and_home_folders_are_replaced(text: str, cleaned: str) -> None:
    users = {"bob", "bob@corp.test", "root", "admin", "system:node:a", ""}
    assert Bundle(users=users).clean(text) == cleaned


def test_values_of_secret_fields_and_of_variables_are_replaced() -> None:
    pod = {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}],
        "password": "x",
        "tokenSecretRef": {"name": "hub"},
        "metadata": {"annotations": {"a": "b"}, "managedFields": []},
    }
    assert without_values([pod]) == [
        {
            "env": [{"name": "A", "value": "…"}, {"name": "B", "value": "…"}],
            "password": "…",
            "tokenSecretRef": {"name": "hub"},
            "metadata": {"annotations": {"a": "…"}},
        }
    ]
