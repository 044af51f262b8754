"""Lists of settings, and the colours of policies."""

from experiments.common import plots, settings, suites
from kvjax.registry import POLICIES


def test_every_setting_of_a_list_can_be_made():
    lists = [*suites.SUITES.values(), *suites.STUDIES.values(), *suites.ABLATIONS.values()]
    chosen = set(settings.settings([method.policy for method in suites.DEMO], ["25%"]))
    for policies, budgets in ((one.policies, one.budgets) for one in lists):
        named = [policy for policy in policies if suites.CALIBRATED not in policy]  # which names a file
        chosen.update(settings.settings(named, budgets))
    for setting in chosen:
        setting.make(32768)


def test_every_policy_has_a_colour_of_its_own():
    assert set(plots.COLOURS) == set(POLICIES)
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    assert plots.colour("chelsea:chunk=64 @ 25%") == plots.COLOURS["chelsea"]
    assert plots.colour("low_rank") is None
