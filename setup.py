"""Finds the packages, whose names differ from their folders."""

from setuptools import find_packages, setup

NAMES = {"fedsim": "fedsim", "attacks": "fedsim_attacks", "defenses": "fedsim_defenses"}
"""Folder -> name of its package. A bare `attacks` would collide with others' in site-packages."""

setup(
    packages=[
        name + package.removeprefix(folder)
        for folder, name in NAMES.items()
        for package in find_packages(include=[folder, f"{folder}.*"])
    ],
    package_dir={name: folder for folder, name in NAMES.items()},
)
