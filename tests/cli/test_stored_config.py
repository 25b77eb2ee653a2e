# SPDX-License-Identifier: Apache-2.0
"""Tables of dynamic keys and of tiers in a run's TOML: read, refused, written and read again."""

from __future__ import annotations

import pathlib
import re

import pytest

import jaxsparse as js
from jaxsparse.cli.resolve import make_features, resolve
from jaxsparse.cli.run_config import RunConfig, load_config
from jaxsparse.config import ConfigError, to_table
from jaxsparse.config_text import to_toml
from tests.cli.commands import captured

TOML = """
[data]
kind = "synthetic"
[table_defaults]
vocabulary_size = 30_000
[tables.user]
tiers = { device_rows = 100, host_rows = 200, ssd = ["disk", "/other"] }
[tables.user.keys]
kind = "dynamic"
capacity = 1000
admission = { kind = "count", min_count = 2 }
eviction = { kind = "ttl", steps = 9 }
[tables.item]
tiers = { device_rows = 50 }
"""


def read(tmp_path: pathlib.Path, *assignments: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return resolve(load_config(path, assignments)[0], "run.toml")


def tables_of(config: RunConfig) -> dict[str, js.TableSpec]:
    return {feature.table.name: feature.table for feature in make_features(config)}


def test_a_table_is_what_its_section_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = read(tmp_path, "train.batches_per_pass=3")
    tables = tables_of(config)
    user, item = tables["user"], tables["item"]
    assert user.keys == js.Dynamic(1000, js.CountAdmission(2), js.TTL(steps=9))
    disks = (str(tmp_path / "disk"), "/other")
    assert user.tiers == js.Tiers(device_rows=100, host_rows=200, ssd=disks)
    assert user.vocabulary_size is None and item.vocabulary_size == 30_000
    assert item.tiers == js.Tiers(device_rows=50)
    assert config.train.batches_per_pass == 3
    # What a run's folder says of it is read back as the same.
    written = tmp_path / "written.toml"
    written.write_text(to_toml(to_table(config)))
    assert load_config(written, ())[0] == config


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("admission", "{kind='bloom', min_count=2, bytes=64}", js.BloomAdmission(2, 64)),
        ("admission", "{kind='probability', p=0.5}", js.ProbabilityAdmission(0.5)),
        ("eviction", "{kind='lru'}", js.LRU()),
        ("eviction", "{kind='lfu'}", js.LFU()),
        ("eviction", "{kind='l2_norm', below=1}", js.L2Norm(below=1.0)),
    ],
)
def test_every_rule_can_be_set(
    tmp_path: pathlib.Path, field: str, value: str, kept: object
) -> None:
    config = read(tmp_path, f"tables.user.keys.{field}={value}", "tables.user.tiers.host_rows=7")
    user = tables_of(config)["user"]
    assert getattr(user.keys, field) == kept
    assert user.tiers is not None and user.tiers.host_rows == 7
    assert to_toml(to_table(config)).count(f"{field} = {{ kind = ") == 1


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("tables.user.keys.eviction=lru", """'lru' (a string); write { kind = "lru" }"""),
        ("tables.user.keys.admission.kind=coutn", "one of count, probability, bloom, did you mean"),
        ("tables.user.keys.eviction={kind='ttl'}", "eviction: TTL: give steps or seconds, got st"),
        ("tables.user.keys={kind='dynamic'}", "tables.user.keys.capacity: is missing, expected"),
        ("tables.user.tiers.ssd=disk", "ssd: expected a list, each item a string, got 'disk'"),
        ("tables.user.tiers.ssd=[]", "tiers: Tiers: host_rows=200 needs ssd=[folders]"),
        ("tables.user.tiers.device_row=1", "unknown key, did you mean 'device_rows'?"),
        ("tables.item.tiers.device_rows=0", "device_rows must be an int >= 1, got 0"),
        ("train.batches_per_pass=0", "batches_per_pass must be >= 1, got 0"),
        (
            "tables.user.keys.eviction={kind='ttl', seconds=60}",
            "tables.user.keys.eviction: a run does not know the time of its data; give TTL steps, "
            "or train in Python with RowStore.passes(time=)",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: pathlib.Path, assignment: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, assignment)
    assert message in str(caught.value)


def test_a_number_of_rows_beside_dynamic_keys_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="vocabulary_size must be None with Dynamic keys"):
        make_features(read(tmp_path, "tables.user.vocabulary_size=5"))


def test_the_plan_tells_bytes_by_tier(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML + "[model]\nbottom = [16]\n")
    told = captured("plan", str(path), "--json").result["stored"]
    assert set(told) == {"user", "item"}
    user = told["user"]
    assert [user[f"{tier}_rows"] for tier in ("device", "ram", "disk")] == [100, 200, 700]
    assert user["row_bytes"] == 128 and user["ram_bytes"] == 200 * 128
    assert user["host_bytes"] < 2**20 and told["item"]["disk_bytes"] == 0
    text = captured("plan", str(path)).out
    (line,) = [line for line in text.splitlines() if "100 rows 12.5 KiB" in line]
    assert line.split()[:3] == ["user", "128", "B"] and "700 rows 100.0 KiB" in line
    total = sum(table["host_bytes"] for table in told.values())
    assert f"host memory for rows: {total / 2**20:.1f} MiB ({total:,}); disks: 100.0 KiB" in text
    # The devices hold places and the shared row of keys without one.
    assert re.search(r"^user +\w+ +101 ", text, re.M)
    assert "stored" not in captured("plan", "--json").result
