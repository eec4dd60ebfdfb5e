"""Finds the packages: the directories are the deployment units, the import package ``meshfusion`` maps onto them.

Everything else is in pyproject.toml. The list is computed because a hand-kept one goes stale: a new package would work
in an editable install and be missing from the wheel.
"""

from setuptools import find_packages, setup

UNITS = ("jbof", "dpu", "host", "tools")


def packages_of(unit: str) -> list[str]:
    return [f"meshfusion.{unit}", *(f"meshfusion.{unit}.{name}" for name in find_packages(unit))]


setup(
    packages=[name for unit in UNITS for name in packages_of(unit)],
    package_dir={f"meshfusion.{unit}": unit for unit in UNITS},
)
