"""Tools of others see what there is. `test_state.py` has copies and files."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import (
    Intermediates,
    plant,
    save_intermediates as S,
    Sow,
    sow,
    summarize,
    tap,
)

from .helpers import assert_close


pytestmark = pytest.mark.sample(1)


X = jnp.array([0.3, -1.2, 0.7])
MODEL = eqx.nn.MLP(3, 2, 5, 1, key=jr.key(0))


def _fn(x):
    h = sow({"b": jnp.sin(x), "a": (2 * x,)}, "z/h")
    return sow(h["b"], "a").sum()


def _captured(x):
    return S(jax.grad(_fn), transform={"a": summarize})(x)[1]


@pytest.mark.parametrize("fn", [S(MODEL), plant(MODEL, {"a": jnp.cos}), tap(MODEL)])
def test_what_is_printed_of_a_transformed_function(fn):
    assert "weight=f32[5,3]" in eqx.tree_pformat(fn) == repr(fn)


def test_what_equinox_prints():
    got = _captured(X)
    text = eqx.tree_pformat(got)
    assert text.startswith("{") and "'z/h'" in text and "rms=f32[]" in text
    assert eqx.tree_pformat(Sow("h")) == "Sow(name='h', spec=None, tag='intermediates')"


# Its own use of NumPy.
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
def test_treescope():
    treescope = pytest.importorskip("treescope")
    text = treescope.render_to_text(_captured(X))
    assert text.startswith("Intermediates({") and "'z/h'" in text and "Summary(" in text
    assert "Sow(name='h'" in treescope.render_to_text(Sow("h"))


@pytest.mark.slow
def test_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    got = _captured(X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "got", got)
        checkpointer.wait_until_finished()
        loaded = checkpointer.restore(tmp_path / "got", jax.eval_shape(_captured, X))
    assert type(loaded) is Intermediates and list(loaded) == list(got)
    assert_close(loaded, got)
