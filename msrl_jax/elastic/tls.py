"""The key that the learner of a run and its actors share, in a file of the user; the first learner makes it.

The file has a private key and a certificate that this key signed for itself, as PEM. Both ends show the certificate, prove that
they have the key, and trust no other certificate, so that TLS 1.3 lets nobody in, read or change anything without the file.
"""

import contextlib
import datetime
import os
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msrl_jax.fragments.support.checks import writing

KEY_VARIABLE = "MSRL_JAX_ACTORS_KEY"  # the variable that names another file
_FORMER = "MSRL_JAX_SECRET"


def key_file() -> Path:
    """The file with the key: the one that `MSRL_JAX_ACTORS_KEY` names, or `msrl-jax/actors.pem` in the user's settings."""
    if given := os.environ.get(KEY_VARIABLE):
        return Path(given).expanduser().absolute()
    settings = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(settings) if os.path.isabs(settings) else Path.home() / ".config") / "msrl-jax" / "actors.pem"


def contexts(said: Callable[[str], Any] | None = None) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What TLS needs at a learner and at an actor.

    Args:
      said: makes the key if there is none, and is called with a line that says where it is; None at an actor, which makes none.

    Raises:
      ValueError: if others may read the file, it belongs to somebody else, it is none that this function makes, or an actor has
        none.
      ImportError: if there is no key, and what makes one is not installed.
    """
    if _FORMER in os.environ:
        raise ValueError(
            f"the variable {_FORMER} has no effect any more: learner and actors share the key in {key_file()}; unset the "
            "variable, and copy this file to machines that do not have it"
        )
    path = key_file()
    if not path.exists():
        if said is None:
            correct = f", or correct the variable {KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else ""
            raise ValueError(f"there is no key {path}; start the learner first, which makes it, or copy the learner's{correct}")
        _make(path)
        said(f"made a key for learner and actors, {path}; copy it to the machines of actors")
    if not path.is_file():
        raise ValueError(f"the key {path} is not a file; name a file in {KEY_VARIABLE}")
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"the key {path} belongs to another user; name a file of your own in {KEY_VARIABLE}")
    if status.st_mode & 0o077:
        raise ValueError(f"others may use the key {path}; keep them out with: chmod 600 {path}")
    learner, actor = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (learner, actor):
        context.minimum_version, context.check_hostname = ssl.TLSVersion.TLSv1_3, False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(path, password="")
            context.load_verify_locations(path)
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror
            raise ValueError(
                f"the key {path} cannot be used ({reason}); delete the file, and the next learner makes another one, or copy "
                "it again from the machine that made it"
            ) from error
    learner.num_tickets = 0  # an actor that comes back proves the key again
    return learner, actor


def _make(path: Path) -> None:
    """Writes a new key, unless another process does so first."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ImportError(
            "the key of learners and actors is made by the package 'cryptography'; install it with: pip install "
            f"'msrl-jax[actors]', or copy {path} from a machine that has one"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "msrl-jax actors")])
    certificate = (
        x509.CertificateBuilder()
        .issuer_name(name)
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))  # clocks may differ
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(private + certificate.public_bytes(pem))
            with contextlib.suppress(FileExistsError):  # what another process has made is the key
                os.link(partial, path)
        finally:
            partial.unlink(missing_ok=True)
