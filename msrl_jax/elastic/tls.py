"""The key that the learner of a run and its actors share, in a file of the user; the first learner creates it.

The PEM file contains a private key and a self-signed certificate. Both ends present the certificate, prove that they have the
key, and trust no other certificate, so without the file, no one can connect, read or change anything (TLS 1.3).
"""

import contextlib
import datetime
import os
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path

from msrl_jax._files import writing

KEY_VARIABLE = "MSRL_JAX_ACTORS_KEY"  # the variable that names another file
_FORMER = "MSRL_JAX_SECRET"


def key_file() -> Path:
    """Returns the file with the key: the one in `MSRL_JAX_ACTORS_KEY`, or `msrl-jax/actors.pem` in the user's config folder."""
    if path := os.environ.get(KEY_VARIABLE):
        return Path(path).expanduser().absolute()
    settings = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(settings) if os.path.isabs(settings) else Path.home() / ".config") / "msrl-jax" / "actors.pem"


def contexts(note: Callable[[str], object] | None = None) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the TLS contexts of a learner and of an actor.

    Args:
      note: for a learner, creates a missing key and is called with a message that says where; None for an actor.

    Raises:
      ValueError: if others may read the file, if it belongs to another user or is not a key file, or if an actor has no key.
      ImportError: if the key does not exist, and the package that creates one is not installed.
    """
    if _FORMER in os.environ:
        raise ValueError(
            f"the variable {_FORMER} no longer has an effect: learner and actors share the key in {key_file()}; unset the "
            "variable, and copy this file to machines that do not have it"
        )
    path = key_file()
    if not path.exists():
        if note is None:
            correct = f", or correct the variable {KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else ""
            raise ValueError(f"the key {path} does not exist; start the learner first to create it, or copy its key{correct}")
        _make_key(path)
        note(f"made a key for learner and actors, {path}; copy it to the machines of actors")
    if not path.is_file():
        raise ValueError(f"the key {path} is not a file; set {KEY_VARIABLE} to a file")
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"the key {path} belongs to another user; set {KEY_VARIABLE} to a file that you own")
    if status.st_mode & 0o077:
        raise ValueError(f"others can read the key {path}; restrict it with: chmod 600 {path}")
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
                f"the key {path} cannot be used ({reason}); delete the file, and the next learner creates a new one, or copy "
                "it again from the machine that created it"
            ) from error
    learner.num_tickets = 0  # an actor that reconnects proves the key again
    return learner, actor


def _make_key(path: Path) -> None:
    """Writes a new key, unless another process is faster."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ImportError(
            "the package 'cryptography' creates the key of learners and actors; install it with: pip install "
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
            with contextlib.suppress(FileExistsError):  # use the key that another process created
                os.link(partial, path)
        finally:
            partial.unlink(missing_ok=True)
