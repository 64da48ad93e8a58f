"""The key that learners and actors of these tests share."""

import pytest

from msrl_jax.elastic import tls


@pytest.fixture(autouse=True, scope="session")
def key_of_actors(tmp_path_factory):
    """The user's own key is none of the tests' business; processes that they start have the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tls.KEY_VARIABLE, str(tmp_path_factory.mktemp("key") / "actors.pem"))
        tls.contexts(lambda line: None)
        yield
