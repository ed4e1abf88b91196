//! The cluster's certificate authority and the identities it signs.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::{Value, json};

/// Signs certificates and stores them as files for the programs.
#[derive(Debug)]
pub(crate) struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// Files of a certificate and its key.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// Files of a key pair without a certificate.
#[derive(Debug, Clone)]
pub(crate) struct SigningKeys {
    pub(crate) private: PathBuf,
    pub(crate) public: PathBuf,
}

impl Authority {
    pub(crate) fn create(directory: PathBuf) -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        params.distinguished_name.push(DnType::CommonName, "e2e");
        fs::write(directory.join("ca.crt"), params.self_signed(&key)?.pem())?;
        Ok(Self { directory, issuer: Issuer::new(params, key) })
    }

    /// Returns the certificate of the authority.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Returns a key that signs tokens and a key that verifies them.
    pub(crate) fn signing_keys(&self, name: &str) -> Result<SigningKeys> {
        let key = KeyPair::generate()?;
        let keys = SigningKeys {
            private: self.directory.join(format!("{name}.key")),
            public: self.directory.join(format!("{name}.pub")),
        };
        fs::write(&keys.private, key.serialize_pem())?;
        fs::write(&keys.public, key.public_key_pem())?;
        Ok(keys)
    }

    /// Returns the identity of a server with these addresses.
    pub(crate) fn server(&self, name: &str, addresses: &[IpAddr]) -> Result<Identity> {
        let names: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let mut params = CertificateParams::new(names)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(name, params)
    }

    /// Returns a kubeconfig of a user and group. The API server takes both from the client
    /// certificate.
    pub(crate) fn kubeconfig(&self, server: &str, user: &str, group: &str) -> Result<PathBuf> {
        let mut params = CertificateParams::default();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.distinguished_name.push(DnType::CommonName, user);
        params.distinguished_name.push(DnType::OrganizationName, group);
        let file_name = user.replace(':', "-");
        let Identity { certificate, key } = self.issue(&file_name, params)?;
        self.write_kubeconfig(
            server,
            &file_name,
            json!({ "client-certificate": certificate, "client-key": key }),
        )
    }

    /// Returns a kubeconfig with a token.
    pub(crate) fn kubeconfig_of_token(&self, server: &str, name: &str, token: &str) -> Result<PathBuf> {
        self.write_kubeconfig(server, name, json!({ "token": token }))
    }

    fn write_kubeconfig(&self, server: &str, name: &str, user: Value) -> Result<PathBuf> {
        let path = self.directory.join(format!("{name}.kubeconfig"));
        fs::write(&path, kubeconfig(server, &self.certificate(), user).to_string())?;
        Ok(path)
    }

    fn issue(&self, name: &str, mut params: CertificateParams) -> Result<Identity> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let identity = Identity {
            certificate: self.directory.join(format!("{name}.crt")),
            key: self.directory.join(format!("{name}.key")),
        };
        fs::write(&identity.certificate, params.signed_by(&key, &self.issuer)?.pem())?;
        fs::write(&identity.key, key.serialize_pem())?;
        Ok(identity)
    }
}

/// Builds a kubeconfig as JSON, which is also YAML.
fn kubeconfig(server: &str, authority: &Path, user: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "e2e", "cluster": { "server": server, "certificate-authority": authority } }],
        "users": [{ "name": "e2e", "user": user }],
        "contexts": [{ "name": "e2e", "context": { "cluster": "e2e", "user": "e2e" } }],
        "current-context": "e2e",
    })
}
