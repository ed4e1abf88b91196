//! Tests of HTTPS, with a certificate that is replaced while the server runs.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use tessera_scheduler::server::{Tls, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

/// Writes a self-signed certificate and returns it.
fn write(directory: &std::path::Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(vec!["tessera".to_owned()]).unwrap();
    std::fs::write(directory.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    std::fs::write(directory.join("cert.pem"), made.cert.pem()).unwrap();
    CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).unwrap()
}

/// Returns the answer to a client that trusts only this certificate.
async fn ask(address: std::net::SocketAddr, trusted: &CertificateDer<'static>) -> Option<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await.ok()?;
    let name = ServerName::try_from("tessera").unwrap();
    let mut stream = TlsConnector::from(Arc::new(client)).connect(name, stream).await.ok()?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: tessera\r\nconnection: close\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}

#[tokio::test]
async fn a_new_certificate_is_used_without_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let first = write(directory.path());
    let tls = Tls::follow(&directory.path().join("cert.pem"), &directory.path().join("key.pem")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, Router::new().route("/", get(|| async { "hello" })), Some(tls)));
    assert!(ask(address, &first).await.unwrap().ends_with("hello"));
    let second = write(directory.path());
    let replaced = async {
        while ask(address, &second).await.is_none() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), replaced).await.unwrap();
    assert!(ask(address, &first).await.is_none(), "the old one is not used any more");
}
