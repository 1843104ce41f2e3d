"""The certificate that both servers show."""

from __future__ import annotations

import ssl

from rakv_cluster.config import Settings
from rakv_cluster.errors import ConfigError


def tls_files(settings: Settings) -> tuple[bytes, bytes]:
    """The private key and the certificate chain that the settings name, as PEM.

    Raises :class:`ConfigError` if they cannot be read or do not belong together: the libraries
    would say so only to clients, by closing their connections.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            settings.tls_cert_file, settings.tls_key_file
        )
        return settings.tls_key_file.read_bytes(), settings.tls_cert_file.read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"certificate {settings.tls_cert_file} with key {settings.tls_key_file}: {error}",
            field="tls_cert_file",
        ) from error
