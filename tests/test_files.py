import pytest

from msrl_jax._files import replacing


def test_an_error_names_the_file_and_not_the_one_that_was_to_replace_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "nowhere" / "page.html") as partial:
        partial.write_text("text")
    assert caught.value.filename == str(tmp_path / "nowhere" / "page.html")
