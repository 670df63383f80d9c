"""Packages made on the spot, in a folder in the place of an index."""

import os
import zipfile


def add_wheel(folder, version, name="batchmill-answer-of-test", needs=()):
    """A wheel whose module has the version as VALUE, and a program with its name that prints it."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}.py", f"VALUE = '{version}'\ndef show():\n    print(VALUE)\n")
        wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {module}:show\n")
        requires = "".join(f"Requires-Dist: {each}\n" for each in needs)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def use_as_index(folder, monkeypatch):
    """Let a folder be the only index, in pip's settings as a user makes them."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
