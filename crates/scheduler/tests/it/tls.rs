//! Tests of the verbs with mutual TLS: which clients are answered, and certificates that are replaced while the
//! server runs.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tessera_scheduler::server::{VERBS, serve_all};
use tessera_serve::{CertificateRole, ClientCheck, Tls, TlsFiles};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

const CLIENT: &str = "tessera-kube-scheduler";

struct Authority {
    certificate: rcgen::Certificate,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let (key, mut params) = (KeyPair::generate().unwrap(), CertificateParams::default());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).unwrap();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    fn issue(&self, name: &str, usage: ExtendedKeyUsagePurpose) -> (rcgen::Certificate, KeyPair) {
        let (key, mut params) =
            (KeyPair::generate().unwrap(), CertificateParams::new([name.to_owned()]).unwrap());
        params.extended_key_usages = vec![usage];
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    fn client(&self, name: &str) -> Identity {
        self.identity(name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn identity(&self, name: &str, usage: ExtendedKeyUsagePurpose) -> Identity {
        let (certificate, key) = self.issue(name, usage);
        Some((certificate.der().clone(), key.serialize_der()))
    }

    /// Writes the files of a server.
    fn write_server(&self, directory: &Path) {
        let (certificate, key) = self.issue("tessera", ExtendedKeyUsagePurpose::ServerAuth);
        std::fs::write(directory.join("tls.key"), key.serialize_pem()).unwrap();
        std::fs::write(directory.join("ca.crt"), self.certificate.pem()).unwrap();
        std::fs::write(directory.join("tls.crt"), certificate.pem()).unwrap();
    }
}

type Identity = Option<(CertificateDer<'static>, Vec<u8>)>;

/// Returns the answer to a client that trusts only this authority, if the server accepts the client.
async fn ask(address: SocketAddr, trusted: &Authority, identity: Identity) -> Option<String> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.certificate.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let client = match identity {
        None => client.with_no_client_auth(),
        Some((certificate, key)) => {
            let key = PrivateKeyDer::try_from(key).unwrap();
            client.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    let stream = TcpStream::connect(address).await.ok()?;
    let name = ServerName::try_from("tessera").unwrap();
    let mut stream = TlsConnector::from(Arc::new(client)).connect(name, stream).await.ok()?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: tessera\r\nconnection: close\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer).filter(|answer| !answer.is_empty())
}

/// Starts a server with the files in the directory.
async fn start(directory: &Path) -> SocketAddr {
    start_with(directory, |tls| tls).await
}

/// Starts a server with an acceptor made from that of the files in the directory.
async fn start_with(directory: &Path, used: impl FnOnce(Tls) -> Tls) -> SocketAddr {
    let clients = ClientCheck { authority: directory.join("ca.crt"), name: CLIENT.to_owned() };
    let tls = Tls::follow(TlsFiles {
        certificate: directory.join("tls.crt"),
        key: directory.join("tls.key"),
        clients: Some(clients),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(|| async { "hello" }));
    tokio::spawn(serve_all(vec![(listener, router, VERBS, Some(used(tls.unwrap())))]));
    address
}

#[tokio::test]
async fn only_a_client_with_the_right_certificate_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, theirs) = (Authority::new(), Authority::new());
    ours.write_server(directory.path());
    let mut keep = None;
    let address = start_with(directory.path(), |tls| {
        keep = Some(tls.clone());
        tls
    })
    .await;
    let tls = keep.unwrap();
    let roles = || tls.expiries().iter().map(|end| end.role).collect::<Vec<_>>();
    assert_eq!(roles(), [CertificateRole::Server, CertificateRole::ClientAuthority]);
    let answer = ask(address, &ours, ours.client(CLIENT)).await.unwrap();
    assert!(answer.ends_with("hello"), "{answer}");
    assert_eq!(
        roles(),
        [CertificateRole::Server, CertificateRole::ClientAuthority, CertificateRole::Client],
        "the end of the certificate that kube-scheduler really uses is known"
    );
    assert_eq!(ask(address, &ours, None).await, None, "without a certificate");
    assert_eq!(ask(address, &ours, theirs.client(CLIENT)).await, None, "of another authority");
    assert_eq!(ask(address, &ours, ours.client("another")).await, None, "with another name");
    let server = ours.identity(CLIENT, ExtendedKeyUsagePurpose::ServerAuth);
    assert_eq!(ask(address, &ours, server).await, None, "the certificate of a server");
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nhost: tessera\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _reset = plain.read_to_end(&mut answer).await;
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP/1.1 200"), "plain HTTP");
}

/// The pages with a login use the certificate of the verbs. Their clients have a token instead of a certificate.
#[tokio::test]
async fn pages_with_the_same_certificate_accept_all_clients() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, theirs) = (Authority::new(), Authority::new());
    ours.write_server(directory.path());
    let address = start_with(directory.path(), |tls| tls.without_client_check()).await;
    assert!(ask(address, &ours, None).await.unwrap().ends_with("hello"));
    assert!(ask(address, &ours, ours.client("another")).await.unwrap().ends_with("hello"));
    assert_eq!(ask(address, &theirs, None).await, None, "the client does not know the authority");
}

#[tokio::test]
async fn new_certificates_are_used_without_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = (Authority::new(), Authority::new());
    first.write_server(directory.path());
    let address = start(directory.path()).await;
    assert!(ask(address, &first, first.client(CLIENT)).await.is_some());
    second.write_server(directory.path());
    let replaced = async {
        while ask(address, &second, second.client(CLIENT)).await.is_none() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), replaced).await.unwrap();
    assert_eq!(ask(address, &first, first.client(CLIENT)).await, None, "the old ones are not used any more");
}
