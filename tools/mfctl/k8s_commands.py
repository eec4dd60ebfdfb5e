"""``mfctl k8s``: render, chart."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.k8s_options import label, namespace_option, node_name, size
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_option, print_document

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServiceConfig
    from meshfusion.tools.k8s.engine import EnginePlan
    from meshfusion.tools.k8s.names import Manifest

_FILE: Final = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step
_CHART_FILES: Final = ("Chart.yaml", "values.yaml", "templates/manifests.yaml")


@click.group()
def k8s() -> None:
    """Write what Kubernetes needs to run services and their engines."""


@k8s.command()
@click.option("--config", "config_file", type=_FILE, required=True, metavar="FILE",
              help="The service's configuration, as its pod shall have it.")  # fmt: skip
@click.option("--image", required=True, metavar="IMAGE", help="The service's image, with mfctl in its PATH.")
@click.option("--node", callback=node_name, metavar="NAME",
              help="The node whose service it is. Without it: of all nodes with the label meshfusion.io/storage=true, "
              "whose configuration names no address of one of them.")  # fmt: skip
@namespace_option
@click.option("--devices", is_flag=True,
              help="Drives are block devices also where the configuration names none: an existing pool's, or later "
              "ones.")  # fmt: skip
@click.option("--memory", "memory_bytes", callback=size, default="1GiB", show_default=True, metavar="SIZE",
              help="What is asked for the service; mfctl plan tells.")  # fmt: skip
@click.option("--cpus", type=FiniteRange(0.1, 1024), default=1.0, show_default=True, metavar="NUMBER",
              help="The same of processors.")  # fmt: skip
@click.option("--drain", "drain_s", type=FiniteRange(0, 3600), default=60.0, show_default=True, metavar="SECONDS",
              help="When a pod is to end, what is open may last so long.")  # fmt: skip
@click.option("--spdk-image", metavar="IMAGE",
              help="With target: spdk: run an nvmf_tgt of this image in the pod; without it, it is the "
              "node's.")  # fmt: skip
@click.option("--monitoring", is_flag=True, help="Also a PodMonitor and a PrometheusRule with all alerts.")
@click.option("--monitor-label", "monitor_labels", multiple=True, metavar="KEY=VALUE", callback=label,
              help="A label by which your Prometheus selects these; may be given several times.")  # fmt: skip
@click.option("--engine-image", metavar="IMAGE", help="Also a Deployment of vLLM, whose image has MeshFusion's wheel.")
@click.option("--model", metavar="MODEL", help="What that engine serves: a name, or a directory of the node.")
@click.option("--gpus", type=click.IntRange(0, 64), default=1, show_default=True, metavar="COUNT",
              help="How many GPUs it gets.")  # fmt: skip
@click.option("--tenant", metavar="NAME", help="Whose engine it is; without it default.")
@click.option("--service", "address", metavar="ADDRESS",
              help="At which it reaches the service, where that is not what it listens on.")  # fmt: skip
@click.option("--rdma-resource", metavar="NAME",
              help="What your device plugin calls RDMA devices; the engine's path rdma needs it.")  # fmt: skip
@click.option("--dpf-chart", metavar="URL",
              help="For a DPU under NVIDIA's DPF: where the chart of mfctl k8s chart was pushed, oci://... or "
              "https://...; a DPUService and a DPUFlavor are written.")  # fmt: skip
@format_option
def render(config_file: Path, image: str, output_format: str, **options: Any) -> None:
    """Write Kubernetes manifests of the service in FILE, for kubectl apply -f -.

    The configuration is checked as the service does it, except for what only its node can tell. What has to be there
    before is told on stderr. --format table and yaml write a stream of documents, json one List.

    With --engine-image also an engine, with the configuration that mfctl connector config writes; what it shows to the
    service is named before the command, as there.
    """
    from meshfusion.tools.k8s.render import Asked
    from meshfusion.tools.k8s.render import render as rendered
    from meshfusion.tools.mfctl.config_model import config_alone

    _check_together(options)
    config = config_alone(config_file)
    asked = Asked(
        source=str(config_file),
        namespace=options["namespace"],
        image=image,
        node=options["node"],
        drives_are_devices=options["devices"],
        memory_bytes=options["memory_bytes"],
        cpus=options["cpus"],
        drain_s=options["drain_s"],
        spdk_image=options["spdk_image"],
        engine=_engine(config, options),
        monitor_labels=options["monitor_labels"] if options["monitoring"] else None,
        dpf_chart=options["dpf_chart"],
        chart_version=_own_version() if options["dpf_chart"] else "",
    )
    made = rendered(config, config_file.read_text(encoding="utf-8"), asked)
    _print(made.manifests, output_format)
    for note in made.notes:
        click.echo(f"note: {note}", err=True)


@k8s.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIRECTORY",
              help="Where the chart's directory, meshfusion, is made.")  # fmt: skip
@format_option
def chart(output: Path, output_format: str) -> None:
    """Write the chart that carries manifests, for platforms that take charts of Helm only.

    It holds no settings of its own: its one value, manifests, is what mfctl k8s render writes. Push it once for each
    version: helm package, helm push.
    """

    target = output / "meshfusion"
    if target.exists():
        raise ConfigError(f"--output: {target} exists", next_step="Remove it, or name another directory.")
    source = files("meshfusion.tools").joinpath("data/kubernetes/chart")
    texts = {name: source.joinpath(name).read_text() for name in _CHART_FILES}
    texts["Chart.yaml"] = texts["Chart.yaml"].replace("@VERSION@", _own_version())
    try:
        for name, text in texts.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(text)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        raise
    if output_format != "table":
        print_document({"chart": str(target), "version": _own_version()}, output_format)
    else:
        push = f"helm package {target} && helm push meshfusion-{_own_version()}.tgz oci://..."
        click.echo(f"wrote {target}; push it: {push}")


def _check_together(options: dict[str, Any]) -> None:
    if (options["engine_image"] is None) != (options["model"] is None):
        raise click.UsageError("--engine-image and --model go together.")
    for name in ("tenant", "address", "rdma_resource"):
        if options[name] is not None and options["engine_image"] is None:
            given = "--service" if name == "address" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{given} is for the engine: add --engine-image and --model.")
    if options["monitor_labels"] and not options["monitoring"]:
        raise click.UsageError("--monitor-label is for --monitoring.")
    if options["dpf_chart"] is not None:
        if options["node"] is None:
            raise click.UsageError("--dpf-chart is for one DPU: add --node, its name in the DPUs' cluster.")
        if options["monitoring"]:
            raise click.UsageError("--monitoring is of another cluster than --dpf-chart: render it without.")
        if not options["dpf_chart"].startswith(("oci://", "https://")):
            raise click.UsageError(f"--dpf-chart: {options['dpf_chart']} does not begin with oci:// or https://.")


def _engine(config: ServiceConfig, options: dict[str, Any]) -> EnginePlan | None:
    """With what ``mfctl connector config`` writes."""
    from meshfusion.tools.k8s.engine import EnginePlan
    from meshfusion.tools.mfctl.connector_snippet import snippet_of_config
    from meshfusion.tools.mfctl.service_access import access_to

    if options["engine_image"] is None:
        return None
    made = snippet_of_config(config, options["address"], options["tenant"], access_to)
    return EnginePlan(
        made.transfer, options["engine_image"], options["model"], options["gpus"], options["rdma_resource"]
    )


def _print(manifests: tuple[Manifest, ...], output_format: str) -> None:
    from meshfusion.tools.k8s.yaml_stream import yaml_stream

    if output_format == "json":
        print_document({"apiVersion": "v1", "kind": "List", "items": list(manifests)}, output_format)
    else:
        click.echo(yaml_stream(manifests), nl=False)


def _own_version() -> str:
    from meshfusion.tools.mfctl.own_version import own_version

    return own_version()
