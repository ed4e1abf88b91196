//! TLS connections to servers that are known by the fingerprint of their certificate.

use std::io;
use std::sync::Arc;

use http::header::{AUTHORIZATION, HOST, HeaderValue};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme};
use sha2::{Digest as _, Sha256};
use tessera_wire::tessera::agent_address::Fingerprint;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::FetchError;
use crate::causes::innermost;

/// Sends a GET request to an HTTPS URL whose server has this certificate. The token is sent only after the handshake,
/// in which the server has proven that it has the key of the certificate.
pub(super) async fn get(
    url: &str,
    certificate: Fingerprint,
    token: Option<&str>,
) -> Result<http::Response<Incoming>, FetchError> {
    let bad = || FetchError::Address(url.to_owned());
    let uri: http::Uri = url.parse().map_err(|_| bad())?;
    let authority = uri.authority().filter(|_| uri.scheme_str() == Some("https")).ok_or_else(bad)?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let unreachable = |error: io::Error| FetchError::Unreachable(innermost(&error));
    let stream =
        TcpStream::connect((host, authority.port_u16().unwrap_or(443))).await.map_err(unreachable)?;
    let name = ServerName::try_from(host.to_owned()).map_err(|_| bad())?;
    let connector = TlsConnector::from(configuration(certificate)?);
    let stream = connector.connect(name, stream).await.map_err(|error| {
        if is_other_certificate(&error) { FetchError::Certificate } else { unreachable(error) }
    })?;
    let failed = |error: hyper::Error| FetchError::Unreachable(innermost(&error));
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
    // The connection ends with the answer.
    tokio::spawn(connection);
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let mut request = http::Request::get(path).header(HOST, authority.as_str());
    if let Some(token) = token {
        let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| FetchError::Token)?;
        value.set_sensitive(true);
        request = request.header(AUTHORIZATION, value);
    }
    let request = request.body(Empty::<bytes::Bytes>::new()).map_err(|_| bad())?;
    sender.send_request(request).await.map_err(failed)
}

fn configuration(certificate: Fingerprint) -> Result<Arc<ClientConfig>, FetchError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| FetchError::Unreachable(error.to_string()))?;
    let verifier = Arc::new(Pinned { certificate, provider });
    Ok(Arc::new(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth()))
}

fn is_other_certificate(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
    let other = rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
    cause == Some(&other)
}

/// Accepts the one certificate with this fingerprint, whatever its names, its issuer and its validity are.
#[derive(Debug)]
struct Pinned {
    certificate: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if Sha256::digest(end_entity)[..] == self.certificate.0 {
            return Ok(ServerCertVerified::assertion());
        }
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
