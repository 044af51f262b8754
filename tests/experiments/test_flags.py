"""The command line of every experiment shows its options."""

import importlib
import pkgutil

import pytest

import experiments
from experiments.common import flags

MODULES = sorted(module.name for module in pkgutil.iter_modules(experiments.__path__) if not module.ispkg)


@pytest.mark.parametrize("name", MODULES)
def test_help_shows_the_options(name, capsys):
    module = importlib.import_module(f"experiments.{name}")
    if not hasattr(module, "Options"):
        pytest.skip("a module without a command line")
    with pytest.raises(SystemExit) as stopped:
        flags.parse(module.Options, ["--help"])
    assert stopped.value.code == 0 and "Options of" in capsys.readouterr().out
