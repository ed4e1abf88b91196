//! TLS with a certificate that may be replaced at run time.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::files::Files;

/// The reason why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The files cannot be read.
    #[error("cannot read the certificate or its key")]
    Files(#[from] std::io::Error),
    /// The files are not PEM.
    #[error("the certificate or its key is not PEM")]
    Pem(#[from] rustls::pki_types::pem::Error),
    /// The certificate and the key do not match, or their type is not supported.
    #[error("the certificate and its key do not match or are not supported")]
    Certificate(#[from] rustls::Error),
}

/// A TLS acceptor that uses the current certificate.
#[derive(Clone)]
pub struct Tls(Arc<RwLock<Arc<ServerConfig>>>);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads the certificate and polls it for changes.
    pub fn follow(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let mut files = Files::new(&[certificate, key]);
        let contents = files.read_if_changed()?.unwrap_or_default().to_vec();
        let tls = Self(Arc::new(RwLock::new(configuration(&contents)?)));
        let current = tls.clone();
        tokio::spawn(files.follow(move |contents| match configuration(contents) {
            Ok(configuration) => {
                current.replace(configuration);
                tracing::info!("the certificate was replaced");
            }
            Err(error) => {
                tracing::warn!(%error, "cannot use the new certificate; the previous one stays in use")
            }
        }));
        Ok(tls)
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }

    fn replace(&self, configuration: Arc<ServerConfig>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = configuration;
    }
}

/// Creates the TLS configuration from the certificate chain and the key, in this order.
fn configuration(contents: &[Vec<u8>]) -> Result<Arc<ServerConfig>, TlsError> {
    let file = |number: usize| contents.get(number).map(Vec::as_slice).unwrap_or_default();
    let chain = CertificateDer::pem_slice_iter(file(0)).collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(file(1))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut configuration = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    configuration.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(configuration))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem(name: &str) -> Vec<Vec<u8>> {
        let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
        vec![made.cert.pem().into_bytes(), made.signing_key.serialize_pem().into_bytes()]
    }

    #[test]
    fn rejects_files_that_are_not_pem_or_do_not_match() {
        let (first, second) = (pem("a"), pem("b"));
        configuration(&first).unwrap();
        assert!(matches!(configuration(&[b"no".to_vec(), b"no".to_vec()]), Err(TlsError::Pem(_))));
        assert!(matches!(configuration(&[]), Err(TlsError::Pem(_))));
        let mixed = [first[0].clone(), second[1].clone()];
        assert!(matches!(configuration(&mixed), Err(TlsError::Certificate(_))));
    }
}
