//! Makes certificates: an authority of our own, the certificates of the server and its client that it signs, and
//! certificates without an authority, which clients know by their fingerprint.
//!
//! Times are arguments, in seconds since 1970.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use sha2::{Digest as _, Sha256};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Certificates are valid from this time before they are made, because clocks differ.
const CLOCK_SKEW: Duration = DAY;

/// Validity of an authority. kube-scheduler reads the authority only when it starts.
const AUTHORITY_VALIDITY: Duration = DAY.saturating_mul(3650);

/// Validity of the certificates of server and client. Where kube-scheduler's certificate is copied by hand, the last
/// third of this time is left for it.
const VALIDITY: Duration = DAY.saturating_mul(365);

/// Validity of a certificate without an authority. It is made at every start, and clients compare only its fingerprint.
const SELF_SIGNED_VALIDITY: Duration = DAY.saturating_mul(3650);

/// Certificates cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot make a certificate")]
pub struct AuthorityError(#[from] rcgen::Error);

/// A certificate and its key, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The part that peers see.
    pub certificate: String,
    /// The private part.
    pub key: String,
    /// The time after which it should be renewed: two thirds of its validity.
    pub renew_after: u64,
}

/// A certificate that no authority has signed, and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfSigned {
    /// The part that peers see, in PEM.
    pub certificate: String,
    /// The private part, in PEM.
    pub key: String,
    /// The fingerprint: the SHA-256 hash of the certificate.
    pub sha256: [u8; 32],
}

/// The side of a connection that a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// For `serverAuth`.
    Server,
    /// For `clientAuth`.
    Client,
}

/// Makes an authority.
pub fn new_authority(now: u64) -> Result<Issued, AuthorityError> {
    let key = KeyPair::generate()?;
    let params = authority_params(now);
    issued(&params.self_signed(&key)?, &key, now, AUTHORITY_VALIDITY)
}

/// Makes a certificate for one side, signed with the key of an authority.
pub fn issue(authority_key: &str, side: Side, names: &[&str], now: u64) -> Result<Issued, AuthorityError> {
    let issuer = Issuer::new(authority_params(now), KeyPair::from_pem(authority_key)?);
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names.clone())?;
    if let Some(name) = names.first() {
        params.distinguished_name.push(DnType::CommonName, name.as_str());
    }
    set_validity(&mut params, now, VALIDITY);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match side {
        Side::Server => ExtendedKeyUsagePurpose::ServerAuth,
        Side::Client => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    let key = KeyPair::generate()?;
    issued(&params.signed_by(&key, &issuer)?, &key, now, VALIDITY)
}

/// Makes a certificate for a server with this name that no authority has signed.
pub fn self_signed(name: &str, now: u64) -> Result<SelfSigned, AuthorityError> {
    let mut params = CertificateParams::new(vec![name.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, name);
    set_validity(&mut params, now, SELF_SIGNED_VALIDITY);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    let sha256 = Sha256::digest(certificate.der());
    Ok(SelfSigned { certificate: certificate.pem(), key: key.serialize_pem(), sha256: sha256.into() })
}

/// Returns the parameters of every authority of ours. The name must not change, because certificates name their
/// issuer by it.
fn authority_params(now: u64) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "tessera-scheduler");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    set_validity(&mut params, now, AUTHORITY_VALIDITY);
    params
}

fn set_validity(params: &mut CertificateParams, now: u64, validity: Duration) {
    let now = date_time_ymd(1970, 1, 1) + Duration::from_secs(now);
    (params.not_before, params.not_after) = (now - CLOCK_SKEW, now + validity);
}

fn issued(
    certificate: &rcgen::Certificate,
    key: &KeyPair,
    now: u64,
    validity: Duration,
) -> Result<Issued, AuthorityError> {
    let renew_after = now + validity.as_secs() / 3 * 2;
    Ok(Issued { certificate: certificate.pem(), key: key.serialize_pem(), renew_after })
}
