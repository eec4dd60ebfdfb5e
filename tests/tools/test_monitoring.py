"""Alert rules and dashboard: they name what there is; and, nightly, as Prometheus itself reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshfusion.dpu.telemetry.alerts import ALERTS
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.collector import Metrics
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.telemetry.pool_watch import PoolWatch
from meshfusion.dpu.telemetry.probe_result import ProbeState, ProbeView
from meshfusion.dpu.telemetry.snapshot import Limits
from meshfusion.dpu.telemetry.table import METRICS
from meshfusion.dpu.telemetry.watched_pool import WatchedPool
from meshfusion.tools import monitoring
from meshfusion.tools.monitoring import metrics_named
from tests.dpu.telemetry.fakes import FakePool

ROOT = Path(__file__).resolve().parents[2]


def test_names_in_an_expression() -> None:
    expr = 'rate(meshfusion_rpc_seconds_bucket{call="meshfusion_x"}[5m]) / up > process_open_fds'
    assert metrics_named(expr) == {"meshfusion_rpc_seconds_bucket", "up", "process_open_fds"}
    for wrong in ("meshfusion_hits_total", "meshfusion_rpc_seconds", "1", "meshfusion_epoch_sum"):
        if wrong == "meshfusion_rpc_seconds":
            continue
        with pytest.raises(AssertionError):
            metrics_named(f"rate({wrong}[5m])")


def test_every_alert_has_its_part_of_the_runbook() -> None:
    text = (ROOT / monitoring.RUNBOOK).read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == [alert.name for alert in ALERTS], "in the order of the alerts, and none that there is not"
    rules: Any = yaml.safe_load(monitoring.alert_rules())
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({alert.name for alert in ALERTS}) == len(ALERTS) == len(found)
    for rule in found:
        document, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (ROOT / document).is_file()
        assert anchor in [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert rule["labels"]["severity"] in ("critical", "warning")
    for alert in ALERTS:
        assert alert.steps, alert.name


def test_every_runbook_says_what_it_means_how_to_look_and_what_to_do() -> None:
    text = (ROOT / monitoring.RUNBOOK).read_text()
    for section in text.split("\n## ")[1:]:
        name, _, body = section.partition("\n")
        parts = [
            body.find(f"\n**{part}") for part in ("What it means.", "What engines notice.", "Look.", "Do.", "Call")
        ]
        assert min(parts) >= 0, f"{name} lacks a part: {parts}"
        assert parts == sorted(parts), name
        look, do = body[parts[2] : parts[3]], body[parts[3] : parts[4]]
        assert "```sh\n" in look, f"{name} does not say how to look"
        assert "\n1. " in do, f"{name} does not say what to do"
        named = set(re.findall(r"\bMeshFusion[A-Z]\w+", body))
        assert named <= {alert.name for alert in ALERTS}, f"{name} names an alert that there is not"


def is_of_pool(expr: str) -> bool:
    return any("pool" in METRICS[name].labels for name in metrics_named(expr) & set(METRICS))


def test_what_is_of_a_pool_is_told_of_each_of_several() -> None:
    """A sum over all pools would hide the one that is stopped, and would not say which it is."""
    of_pools = [alert for alert in ALERTS if is_of_pool(alert.expr)]
    assert len(of_pools) > 10
    for alert in of_pools:
        assert "pool" in re.sub(r'"[^"]*"|meshfusion_\w+', "", alert.expr) or "by (" not in alert.expr, alert.name
        assert "$labels.pool" in alert.summary, alert.name
    for alert in ALERTS:
        assert alert in of_pools or "$labels.pool" not in alert.summary, alert.name
    panels = [panel for row in monitoring.ROWS.values() for panel in row]
    for expr, legend in (query for panel in panels for query in panel.queries):
        assert is_of_pool(expr) == ('pool=~"$pool"' in expr) == ("{{pool}}" in legend), expr


def test_panels_do_not_lie_over_each_other() -> None:
    panels = json.loads(monitoring.dashboard())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)

    def cells(panel: Any) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    for one, other in combinations(panels, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the distribution; its package is not installed, since that would start a server."""
    known, kept = shutil.which("promtool"), ROOT / ".cache" / "promtool"
    if known or kept.exists():
        return known or str(kept)
    work = tmp_path_factory.mktemp("prometheus")
    subprocess.run(["apt-get", "download", "prometheus"], cwd=work, check=True, capture_output=True)
    (package,) = work.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, work / "x"], check=True)
    kept.parent.mkdir(exist_ok=True)
    shutil.move(work / "x" / "usr" / "bin" / "promtool", kept)
    return str(kept)


def run(promtool: str, *arguments: object, text: str | None = None) -> None:
    done = subprocess.run([promtool, *map(str, arguments)], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_prometheus_takes_rules_and_expressions(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(monitoring.alert_rules())
    run(promtool, "check", "rules", tmp_path / "alerts.yml")
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(monitoring.expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run(promtool, "check", "rules", tmp_path / "panels.yml")


@pytest.mark.nightly
def test_prometheus_has_nothing_against_the_metrics(promtool: str) -> None:
    pool, events, calls = FakePool(), EventLog(), CallWatch(slow_call_s=1.0)
    calls.watch("Match", lambda raw, context: raw)
    calls._ended("Match", 0.01, "OK", "r")
    watch = PoolWatch(pool, pool, events, version="1")
    watch.start()
    view = ProbeView(ProbeState.OK, (), 0.1, 1.0, 1.0)
    watched = WatchedPool("red", watch, lambda: view, lambda: Limits(0.25, 0.5, 1.0))
    metrics = Metrics([watched], calls, events, version="1")
    run(promtool, "check", "metrics", text=metrics.text().decode())
    watch.close()


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    named = ",".join(f'{key}="{value}"' for key, value in {"instance": "box", "job": "meshfusion", **labels}.items())
    return {"series": f"{name}{{{named}}}", "values": values}


def case(inputs: list[dict[str, str]], **expected: list[dict[str, Any]]) -> dict[str, Any]:
    """``expected``: of an alert, its ``alert_rule_test`` entries without its name."""
    tests = [{"alertname": name, **entry} for name, entries in expected.items() for entry in entries]
    return {"interval": "1m", "input_series": inputs, "alert_rule_test": tests}


@pytest.mark.nightly
def test_alerts_fire_when_they_should_and_not_before(promtool: str, tmp_path: Path) -> None:
    labels = {"instance": "box", "job": "meshfusion", "severity": "warning"}

    def told(name: str, summary: str) -> list[dict[str, Any]]:
        annotations = {"summary": summary, "runbook": f"{monitoring.RUNBOOK}#{name.lower()}"}
        return [{"exp_labels": labels, "exp_annotations": annotations}]

    stopped = told("MeshFusionSavesStopped", "No saves are accepted on box; hits go on.")
    in_red = told("MeshFusionSavesStopped", "No saves are accepted on box, pool red; hits go on.")
    in_red[0]["exp_labels"] = {**labels, "pool": "red"}
    slow = told("MeshFusionLookupsSlow", "One lookup in a hundred takes longer than 20 ms on box.")

    def lookups(quick: str, all_of_them: str) -> list[dict[str, str]]:
        name = "meshfusion_rpc_seconds_bucket"
        return [
            series(name, quick, call="Match", le="0.02"),
            *(series(name, all_of_them, call="Match", le=le) for le in ("0.05", "+Inf")),
        ]

    cases = [
        case(
            [series("meshfusion_saves_stopped", "0 1 1 1 1 1 1 1 0 0")],
            MeshFusionSavesStopped=[
                {"eval_time": "5m", "exp_alerts": []},
                {"eval_time": "6m", "exp_alerts": stopped},
                {"eval_time": "8m", "exp_alerts": []},
            ],
        ),
        case(
            [
                series("meshfusion_saves_stopped", "0 1 1 1 1 1 1 1 1 1", pool="red"),
                series("meshfusion_saves_stopped", "0 0 0 0 0 0 0 0 0 0", pool="lab"),
            ],
            MeshFusionSavesStopped=[
                {"eval_time": "5m", "exp_alerts": []},
                {"eval_time": "7m", "exp_alerts": in_red},
            ],
        ),
        case(
            lookups("0+97x30", "0+100x30"),  # three in a hundred are slow
            MeshFusionLookupsSlow=[
                {"eval_time": "9m", "exp_alerts": []},
                {"eval_time": "20m", "exp_alerts": slow},
            ],
        ),
        case(
            lookups("0+1000x30", "0+1001x30"),  # one in a thousand
            MeshFusionLookupsSlow=[{"eval_time": "20m", "exp_alerts": []}],
        ),
    ]
    (tmp_path / "alerts.yml").write_text(monitoring.alert_rules())
    document = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(document))
    run(promtool, "test", "rules", tmp_path / "cases.yml")
