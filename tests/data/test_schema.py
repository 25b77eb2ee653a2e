# SPDX-License-Identifier: Apache-2.0
"""The column schema: defaults, and names that clash."""

from __future__ import annotations

from typing import Any

import pytest

from jaxsparse.config import ConfigError, parse
from jaxsparse.data.schema import ColumnSchema, FeatureColumn


def test_roles_and_defaults() -> None:
    schema = ColumnSchema(
        label="click", dense=("age",), weight="w", features={"item": "id", "item2": "id", "x": "y"}
    )
    assert schema.roles() == {
        "label": ["click"],
        "dense": ["age"],
        "weight": ["w"],
        "feature": ["id", "y"],
    }


def test_a_feature_is_its_own_column_by_default() -> None:
    schema = ColumnSchema(features={"city": FeatureColumn(type="string")})
    assert schema.feature_columns()["city"].column == "city"


def test_it_is_read_from_toml_tables() -> None:
    table = {
        "label": "click",
        "dense": ["age"],
        "features": {"item": "item_id", "clicked": {"column": "history", "separator": "|"}},
    }
    schema = parse(ColumnSchema, table, "run.toml")
    assert schema.dense == ("age",)
    assert schema.feature_columns()["clicked"] == FeatureColumn(column="history", separator="|")
    assert schema.feature_columns()["item"] == FeatureColumn(column="item_id")
    with pytest.raises(ConfigError, match=r"run\.toml: .*lable"):
        parse(ColumnSchema, {"lable": "click"}, "run.toml")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"label_kind": "real"}, r"label_kind must be one of \('binary', 'any'\), got 'real'"),
        ({"delimiter": "||"}, r"delimiter must be one ASCII character .*, got '\|\|'"),
        ({"dense": ("label",)}, "'label' is named twice among label, dense, weight and features"),
        ({"dense": ("a",), "features": {"a": "b"}}, "'a' is named twice among"),
        ({"weight": "w", "features": {"w": "b"}}, "'w' is named twice among"),
        (
            {"features": {"a": FeatureColumn(separator=",")}},
            "feature 'a': separator ',' is also the delimiter between cells",
        ),
    ],
)
def test_errors(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ColumnSchema(**arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"type": "int"}, r"type must be one of \('integer', 'string'\), got 'int'"),
        ({"separator": ""}, "separator must not be empty"),
    ],
)
def test_feature_errors(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FeatureColumn(**arguments)
