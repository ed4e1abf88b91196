//! When certificates expire.

use std::fmt;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

/// The end of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CertificateExpiry {
    /// What the certificate is for.
    pub role: CertificateRole,
    /// Last moment of its validity, in seconds since 1970.
    pub unix_seconds: u64,
}

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertificateRole {
    /// The server shows it to its clients.
    Server,
    /// The last client that connected has shown it.
    Client,
    /// It signs the certificates of clients.
    ClientAuthority,
}

impl fmt::Display for CertificateRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server",
            Self::Client => "client",
            Self::ClientAuthority => "client-authority",
        })
    }
}

/// Returns when a certificate expires, or `None` if it cannot be parsed.
pub(crate) fn of(certificate: &CertificateDer<'_>) -> Option<u64> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    u64::try_from(parsed.validity().not_after.timestamp()).ok()
}

/// Returns when the certificates in a PEM file expire.
pub(crate) fn all_of(pem: &[u8]) -> impl Iterator<Item = u64> {
    CertificateDer::pem_slice_iter(pem).filter_map(|certificate| of(&certificate.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::{Side, issue, new_authority};
    use crate::{Tls, TlsPem};

    const NOW: u64 = 1_800_000_000;
    const DAY: u64 = 24 * 60 * 60;

    #[test]
    fn reports_the_first_end_of_a_chain_and_the_last_of_an_authority() {
        let (old, new) = (new_authority(NOW - 100 * DAY).unwrap(), new_authority(NOW).unwrap());
        let server = issue(&new.key, Side::Server, &["server"], NOW).unwrap();
        let pem = TlsPem {
            certificate: format!("{}{}", server.certificate, new.certificate),
            key: server.key,
            authority: format!("{}{}", old.certificate, new.certificate),
        };
        let tls = Tls::for_client(pem.clone(), "client").unwrap();
        let expected = [
            (CertificateRole::Server, NOW + 365 * DAY),
            (CertificateRole::ClientAuthority, NOW + 3650 * DAY),
        ];
        let expiries =
            |tls: &Tls| tls.expiries().iter().map(|end| (end.role, end.unix_seconds)).collect::<Vec<_>>();
        assert_eq!(expiries(&tls), expected);
        assert_eq!(expiries(&tls.without_client_check()), expected);
        tls.update(TlsPem { authority: old.certificate, ..pem }).unwrap();
        assert_eq!(expiries(&tls)[1], (CertificateRole::ClientAuthority, NOW + 3550 * DAY));
    }

    #[test]
    fn a_certificate_that_cannot_be_parsed_has_no_end() {
        assert_eq!(of(&CertificateDer::from_slice(b"no certificate")), None);
        assert_eq!(all_of(b"no PEM").next(), None);
    }
}
