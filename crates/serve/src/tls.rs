//! TLS with certificates that may be replaced at run time, and with a check of the client's certificate.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, RootCertStore, ServerConfig, ServerConnection,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use webpki::EndEntityCert;

use crate::expiry::{self, CertificateExpiry, CertificateRole};
use crate::files::Files;

/// The reason why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The files cannot be read.
    #[error("cannot read the certificate, its key or the authority of clients")]
    Files(#[from] io::Error),
    /// The files are not PEM.
    #[error("the certificate, its key or the authority of clients is not PEM")]
    Pem(#[from] rustls::pki_types::pem::Error),
    /// The certificate and the key do not match, or their type is not supported.
    #[error("the certificate and its key do not match or are not supported")]
    Certificate(#[from] rustls::Error),
    /// The certificates of the authority cannot sign those of clients.
    #[error("the authority of clients cannot be used")]
    Authority(#[from] VerifierBuilderError),
    /// The name is not a DNS name.
    #[error("{0:?} is not a DNS name, which a client's certificate could have")]
    ClientName(String),
    /// The server refuses a client with its own certificate, or the client refuses the server.
    #[error("a client with the certificate of the server is refused")]
    OwnClient(#[source] rustls::Error),
    /// The certificate of the server lacks the name of the client.
    #[error("the certificate of the server does not have the DNS name {0} of the client")]
    NoClientName(String),
}

/// The reason why a client gets no TLS session.
#[derive(Debug, thiserror::Error)]
enum NoSession {
    #[error("the TLS handshake failed")]
    Handshake(#[from] io::Error),
    #[error("the client's certificate is for another name")]
    Name,
}

/// The files of a server's certificate, in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The chain of the server's certificate.
    pub certificate: PathBuf,
    /// The private part of the certificate.
    pub key: PathBuf,
    /// The check of clients; all clients are accepted without one.
    pub clients: Option<ClientCheck>,
}

/// The clients that are accepted.
#[derive(Clone, Debug)]
pub struct ClientCheck {
    /// The certificates of the authority that signs those of clients.
    pub authority: PathBuf,
    /// The DNS name that the certificate of a client must have.
    pub name: String,
}

/// The certificate of one side and the authority of the other one, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPem {
    /// The chain of the certificate.
    pub certificate: String,
    /// The private part of the certificate.
    pub key: String,
    /// The certificates of the authority that signs that of the other side.
    pub authority: String,
}

/// The contents of the files of a server, in PEM.
#[derive(Clone, Copy, Debug)]
struct Contents<'a> {
    certificate: &'a [u8],
    key: &'a [u8],
    /// The authority of clients, if they are checked.
    authority: Option<&'a [u8]>,
}

impl<'a> Contents<'a> {
    /// Names the files of [`TlsFiles`], which are read in the order of its fields.
    fn of_files(files: &'a [Vec<u8>]) -> Self {
        let file = |number: usize| files.get(number).map(Vec::as_slice);
        let (certificate, key) = (file(0).unwrap_or_default(), file(1).unwrap_or_default());
        Self { certificate, key, authority: file(2) }
    }

    fn of_pem(pem: &'a TlsPem) -> Self {
        let TlsPem { certificate, key, authority } = pem;
        Self {
            certificate: certificate.as_bytes(),
            key: key.as_bytes(),
            authority: Some(authority.as_bytes()),
        }
    }
}

/// A TLS acceptor that uses the current certificates.
#[derive(Clone)]
pub struct Tls {
    current: Arc<RwLock<Configurations>>,
    /// End of the certificate of the last client that connected, in seconds since 1970, or 0.
    client_expiry: Arc<AtomicU64>,
    client_name: Option<ServerName<'static>>,
}

/// The TLS configurations with one certificate of the server.
#[derive(Clone, Debug)]
struct Configurations {
    /// Requires a certificate of the client, if there is an authority of clients.
    checking: Arc<ServerConfig>,
    /// Requires none.
    public: Arc<ServerConfig>,
    /// Ends of the certificates in both.
    expiries: Vec<CertificateExpiry>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("client_name", &self.client_name).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files and polls them for changes.
    pub fn follow(files: TlsFiles) -> Result<Self, TlsError> {
        let TlsFiles { certificate, key, clients } = files;
        let mut paths = vec![certificate.as_path(), key.as_path()];
        paths.extend(clients.as_ref().map(|clients| clients.authority.as_path()));
        let mut files = Files::new(&paths);
        let contents = files.read_if_changed()?.unwrap_or_default();
        let tls = Self::new(Contents::of_files(contents), clients.map(|clients| clients.name))?;
        let current = tls.clone();
        tokio::spawn(files.follow(move |contents| match configurations(Contents::of_files(contents)) {
            Ok(configurations) => {
                current.replace(configurations);
                tracing::info!("the certificates were replaced");
            }
            Err(error) => {
                tracing::warn!(%error, "cannot use the new certificates; the previous ones stay in use");
            }
        }));
        Ok(tls)
    }

    /// Accepts clients with this DNS name in their certificate.
    pub fn for_client(pem: TlsPem, client_name: &str) -> Result<Self, TlsError> {
        Self::new(Contents::of_pem(&pem), Some(client_name.to_owned()))
    }

    /// Accepts all clients with this certificate and key, in PEM.
    pub fn for_all(certificate: &str, key: &str) -> Result<Self, TlsError> {
        let (certificate, key) = (certificate.as_bytes(), key.as_bytes());
        Self::new(Contents { certificate, key, authority: None }, None)
    }

    /// Returns an acceptor with the same certificate of the server, now and later, that accepts all clients.
    #[must_use]
    pub fn without_client_check(&self) -> Self {
        Self {
            current: Arc::clone(&self.current),
            client_expiry: Arc::clone(&self.client_expiry),
            client_name: None,
        }
    }

    /// Uses other certificates for new connections.
    pub fn update(&self, pem: TlsPem) -> Result<(), TlsError> {
        self.replace(configurations(Contents::of_pem(&pem))?);
        Ok(())
    }

    fn new(contents: Contents<'_>, client_name: Option<String>) -> Result<Self, TlsError> {
        let client_name = client_name
            .map(|name| ServerName::try_from(name.clone()).map_err(|_| TlsError::ClientName(name)))
            .transpose()?;
        let current = Arc::new(RwLock::new(configurations(contents)?));
        Ok(Self { current, client_expiry: Arc::default(), client_name })
    }

    /// Returns when the certificates in use expire: those of the server and of the authority of clients, and that of
    /// the last client that connected.
    #[must_use]
    pub fn expiries(&self) -> Vec<CertificateExpiry> {
        let mut all = self.current.read().unwrap_or_else(PoisonError::into_inner).expiries.clone();
        let client = self.client_expiry.load(Ordering::Relaxed);
        if client != 0 {
            all.push(CertificateExpiry { role: CertificateRole::Client, unix_seconds: client });
        }
        all
    }

    /// Returns whether clients need a certificate.
    #[must_use]
    pub fn checks_clients(&self) -> bool {
        self.client_name.is_some()
    }

    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, Box<dyn std::error::Error + Send + Sync>> {
        let stream = self.acceptor().accept(stream).await.map_err(NoSession::Handshake)?;
        if let Some(name) = &self.client_name {
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let Some(certificate) = certificates.first().filter(|certificate| has_name(certificate, name))
            else {
                return Err(NoSession::Name.into());
            };
            self.client_expiry.store(expiry::of(certificate).unwrap_or(0), Ordering::Relaxed);
        }
        Ok(stream)
    }

    fn acceptor(&self) -> TlsAcceptor {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let used = if self.checks_clients() { &current.checking } else { &current.public };
        TlsAcceptor::from(Arc::clone(used))
    }

    fn replace(&self, configurations: Configurations) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = configurations;
    }
}

/// Returns whether a certificate, whose signature the handshake has verified, is for this name.
fn has_name(certificate: &CertificateDer<'_>, name: &ServerName<'_>) -> bool {
    EndEntityCert::try_from(certificate)
        .is_ok_and(|certificate| certificate.verify_is_valid_for_subject_name(name).is_ok())
}

/// Creates the TLS configurations of a server. Without an authority of clients there is only one.
fn configurations(contents: Contents<'_>) -> Result<Configurations, TlsError> {
    let public = configuration(Contents { authority: None, ..contents })?;
    let checking = if contents.authority.is_some() { configuration(contents)? } else { Arc::clone(&public) };
    let mut expiries = Vec::new();
    // A chain ends with the first of its certificates; an authority works while one of its certificates does.
    let mut add = |role, unix_seconds: Option<u64>| {
        expiries.extend(unix_seconds.map(|unix_seconds| CertificateExpiry { role, unix_seconds }));
    };
    add(CertificateRole::Server, expiry::all_of(contents.certificate).min());
    add(CertificateRole::ClientAuthority, contents.authority.and_then(|pem| expiry::all_of(pem).max()));
    Ok(Configurations { checking, public, expiries })
}

fn configuration(contents: Contents<'_>) -> Result<Arc<ServerConfig>, TlsError> {
    let certificates = |pem| CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let (chain, key) = (certificates(contents.certificate)?, PrivateKeyDer::from_pem_slice(contents.key)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    let builder = match contents.authority {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            for root in certificates(authority)? {
                roots.add(root)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build()?)
        }
    };
    let mut configuration = builder.with_single_cert(chain, key)?;
    configuration.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(configuration))
}

/// Creates the TLS configuration of a client that shows this certificate and trusts this authority.
pub fn client_configuration(pem: &TlsPem) -> Result<ClientConfig, TlsError> {
    let certificates =
        |pem: &str| CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    let (chain, key) = (certificates(&pem.certificate)?, PrivateKeyDer::from_pem_slice(pem.key.as_bytes())?);
    let mut roots = RootCertStore::empty();
    for root in certificates(&pem.authority)? {
        roots.add(root)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_client_auth_cert(chain, key)?)
}

/// Checks that a server with this certificate accepts itself as a client of this name, and that its certificate has the
/// name of the server. Replicas that share the certificate can then call each other.
pub fn check_own_client(pem: &TlsPem, client_name: &str, server_name: &str) -> Result<(), TlsError> {
    let name =
        |text: &str| ServerName::try_from(text.to_owned()).map_err(|_| TlsError::ClientName(text.to_owned()));
    let mut client = ClientConnection::new(Arc::new(client_configuration(pem)?), name(server_name)?)?;
    let mut server = ServerConnection::new(configuration(Contents::of_pem(pem))?)?;
    // Both sides are in memory: what one writes, the other one reads, until neither waits for anything.
    while client.wants_write() || server.wants_write() {
        transfer(&mut client, &mut server)?;
        transfer(&mut server, &mut client)?;
    }
    let shown = server.peer_certificates().unwrap_or_default().first();
    let client = name(client_name)?;
    if shown.is_some_and(|certificate| has_name(certificate, &client)) {
        return Ok(());
    }
    Err(TlsError::NoClientName(client_name.to_owned()))
}

/// Lets one side of a connection in memory read what the other one has written.
fn transfer<From, To>(
    from: &mut ConnectionCommon<From>,
    to: &mut ConnectionCommon<To>,
) -> Result<(), TlsError> {
    let mut bytes = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut bytes)?;
    }
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        to.read_tls(&mut rest)?;
        to.process_new_packets().map_err(TlsError::OwnClient)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem(name: &str) -> Vec<Vec<u8>> {
        let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
        vec![made.cert.pem().into_bytes(), made.signing_key.serialize_pem().into_bytes()]
    }

    fn configured(files: &[Vec<u8>]) -> Result<Configurations, TlsError> {
        configurations(Contents::of_files(files))
    }

    #[test]
    fn rejects_files_that_are_not_pem_or_do_not_match() {
        let (first, second) = (pem("a"), pem("b"));
        let made = configured(&first).unwrap();
        assert!(Arc::ptr_eq(&made.checking, &made.public), "there are no clients to check");
        assert!(matches!(configured(&[b"no".to_vec(), b"no".to_vec()]), Err(TlsError::Pem(_))));
        assert!(matches!(configured(&[]), Err(TlsError::Pem(_))));
        let mixed = [first[0].clone(), second[1].clone()];
        assert!(matches!(configured(&mixed), Err(TlsError::Certificate(_))));
        let empty = [first[0].clone(), first[1].clone(), Vec::new()];
        assert!(matches!(configured(&empty), Err(TlsError::Authority(_))), "no client could ever connect");
    }

    /// Returns a certificate with these names and usages that an authority has signed.
    fn signed(names: &[&str], usages: &[rcgen::ExtendedKeyUsagePurpose]) -> TlsPem {
        let mut authority = rcgen::CertificateParams::default();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let (authority_key, key) = (rcgen::KeyPair::generate().unwrap(), rcgen::KeyPair::generate().unwrap());
        let root = authority.self_signed(&authority_key).unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = rcgen::CertificateParams::new(names).unwrap();
        params.extended_key_usages = usages.to_vec();
        let issuer = rcgen::Issuer::new(authority, authority_key);
        let certificate = params.signed_by(&key, &issuer).unwrap().pem();
        TlsPem { certificate, key: key.serialize_pem(), authority: root.pem() }
    }

    #[test]
    fn a_certificate_for_both_sides_lets_replicas_call_each_other() {
        use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let check = |names: &[&str], usages: &[rcgen::ExtendedKeyUsagePurpose]| {
            check_own_client(&signed(names, usages), "caller", "service")
        };
        assert!(check(&["service", "caller"], &[ServerAuth, ClientAuth]).is_ok());
        assert!(check(&["service", "caller"], &[]).is_ok(), "without usages, all are allowed");
        let no_client = check(&["service", "caller"], &[ServerAuth]);
        assert!(matches!(no_client, Err(TlsError::OwnClient(_))), "{no_client:?}");
        let no_name = check(&["service"], &[ServerAuth, ClientAuth]);
        assert!(matches!(&no_name, Err(TlsError::NoClientName(name)) if name == "caller"), "{no_name:?}");
        let other_service = check(&["another", "caller"], &[ServerAuth, ClientAuth]);
        assert!(matches!(other_service, Err(TlsError::OwnClient(_))), "{other_service:?}");
        let other_authority = TlsPem {
            authority: signed(&["a"], &[]).authority,
            ..signed(&["service", "caller"], &[ServerAuth, ClientAuth])
        };
        assert!(check_own_client(&other_authority, "caller", "service").is_err());
    }

    #[test]
    fn certificates_are_compared_by_name() {
        let made = rcgen::generate_simple_self_signed(vec!["kube-scheduler".to_owned()]).unwrap();
        let name = |text: &'static str| ServerName::try_from(text).unwrap();
        assert!(has_name(made.cert.der(), &name("kube-scheduler")));
        assert!(!has_name(made.cert.der(), &name("another")));
    }
}
