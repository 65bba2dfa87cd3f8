import sys
from pathlib import Path

import pytest
from conftest import KERNELS

from tuner.catalog import Catalog, builder_for, device_class, device_kinds, split_device
from tuner.records import UsageError


def test_shipped_and_own_kernels_are_found():
    catalog = Catalog([KERNELS])
    assert {"matmul", "softmax", "scale"} <= set(catalog.kernels)
    assert "scale" not in Catalog().kernels


def test_a_missing_piece_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "lonely.yaml").touch()
    with pytest.raises(UsageError, match=r"'lonely' is incomplete: there is no .*lonely\.py"):
        Catalog([tmp_path]).problem_path("lonely")


def test_unknown_names_are_errors_that_list_the_known():
    with pytest.raises(UsageError, match="unknown kernel 'nope'; known: .*matmul"):
        Catalog().space_path("nope")
    with pytest.raises(UsageError, match="unknown device 'tpu'; known: .*cpu, cuda"):
        device_class("tpu")
    with pytest.raises(UsageError, match="unknown language 'rust'; known: cpp, triton"):
        builder_for("rust")
    with pytest.raises(UsageError, match="--device cuda:x: 'x' is not an index"):
        split_device("cuda:x")
    with pytest.raises(UsageError, match="--kernels /nowhere: no such folder"):
        Catalog([Path("/nowhere")])


@pytest.mark.parametrize("kind", device_kinds())
def test_every_device_states_the_limits_that_constraints_may_use(kind):
    device = device_class(kind)
    assert device.kind == kind
    assert device.limit_names
    assert all(builder_for(language) for language in device.languages)


def test_devices_are_looked_up_without_torch(tmp_path):
    import subprocess

    code = (
        "import sys; from tuner.catalog import *; [device_class(kind) for kind in device_kinds()];"
        "builder_for('cpp'); builder_for('triton');"
        "assert not {'torch', 'triton'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
