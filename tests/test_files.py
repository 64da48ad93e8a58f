import pytest

from msrl_jax._files import replacing


def test_a_write_that_fails_leaves_the_file_as_it_was_and_no_part(tmp_path):
    (file := tmp_path / "page.html").write_text("old")
    with pytest.raises(OSError, match="No space left"), replacing(file) as partial:
        partial.write_text("new")
        raise OSError(28, "No space left on device")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", "old")]


def test_an_error_names_the_file_and_not_the_one_that_was_to_replace_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "nowhere" / "page.html") as partial:
        partial.write_text("text")
    assert caught.value.filename == str(tmp_path / "nowhere" / "page.html")
