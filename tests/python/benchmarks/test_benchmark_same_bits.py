"""The cases of benchmarks/same_bits.py, which itself needs a CUDA device."""

import itertools
from types import SimpleNamespace


def test_every_form_runs_with_every_value_of_the_other_axes():
    import same_bits

    gated = SimpleNamespace(smoe_activation_is_gated=lambda number: (1, 1, 0, 0, -1)[number])
    found = list(same_bits.cases([SimpleNamespace(lib=gated)] * 2))
    assert len(found) == 2 * 2 * (3 + 2) * len(same_bits.SHAPES)
    for axis in ("shape", "order", "dtype", "gated", "bias", "accumulate"):
        pairs = {(case.form, getattr(case, axis)) for case in found}
        values = {value for _, value in pairs}
        assert pairs == set(itertools.product(range(3), values)), axis
