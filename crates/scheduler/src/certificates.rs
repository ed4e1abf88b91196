//! The certificates of the verbs, kept in Secrets: an authority, the server's certificate, and kube-scheduler's.
//!
//! [`plan`] decides what has to be renewed and is free of IO. [`Certificates`] reads and writes the Secrets, which
//! have the keys of cert-manager's Secrets.

pub mod plan;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use tessera_cluster::secrets::{SecretError, Secrets};
use tessera_cluster::{Client, with_causes};
use tessera_serve::authority::AuthorityError;
use tessera_serve::{Tls, TlsError, TlsPem};

use self::plan::{AUTHORITY, CLIENT, Pem, SERVER, Stored};

/// Interval of checks. Another replica may have renewed the certificates.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Attempts to write Secrets that other replicas write at the same time.
const MAX_ATTEMPTS: usize = 5;

/// The reason why there are no certificates.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The Secrets cannot be read or written.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The certificates cannot be made.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// The Secrets with the certificates.
#[derive(Clone, Debug)]
pub struct Certificates {
    secrets: Secrets,
    client_name: String,
}

impl Certificates {
    /// Uses the Secrets of this namespace.
    #[must_use]
    pub fn of(client: Client, namespace: &str, client_name: &str) -> Self {
        Self { secrets: Secrets::of(client, namespace), client_name: client_name.to_owned() }
    }

    /// Makes or renews the certificates if necessary. The returned acceptor always uses the newest ones.
    pub async fn follow(self) -> Result<Tls, CertificateError> {
        let mut current = self.ensure().await?;
        let tls = Tls::for_client(current.clone(), &self.client_name)?;
        let updated = tls.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(CHECK_INTERVAL).await;
                let renewed = match self.ensure().await {
                    Ok(renewed) if renewed == current => continue,
                    Ok(renewed) => updated.update(renewed.clone()).map(|()| renewed).map_err(Into::into),
                    Err(error) => Err(error),
                };
                match renewed {
                    Ok(renewed) => {
                        current = renewed;
                        tracing::info!("the certificates of the verbs were replaced");
                    }
                    Err(error) => {
                        let error = with_causes(&error);
                        tracing::warn!(%error, "cannot check the certificates of the verbs; the previous ones stay in use");
                    }
                }
            }
        });
        Ok(tls)
    }

    /// Returns valid certificates of the server, after all certificates that are due have been renewed.
    async fn ensure(&self) -> Result<TlsPem, CertificateError> {
        let mut attempts = 1..=MAX_ATTEMPTS;
        loop {
            attempts.next();
            match self.try_ensure().await {
                Err(CertificateError::Secret(error)) if error.is_conflict() && !attempts.is_empty() => {}
                outcome => return outcome,
            }
        }
    }

    async fn try_ensure(&self) -> Result<TlsPem, CertificateError> {
        let authority = self.secrets.read(AUTHORITY).await?;
        let server = self.secrets.read(SERVER).await?;
        let client = self.secrets.read(CLIENT).await?;
        let pem = |secret: &tessera_cluster::secrets::StoredSecret| {
            Pem::read(&BTreeMap::from(plan::KEYS.map(|key| (key, secret.text(key)))))
        };
        let stored = Stored { authority: pem(&authority), server: pem(&server), client: pem(&client) };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let planned = plan::renew(&stored, &self.client_name, now)?;
        // The authority is written first: certificates of an authority that is not stored could not be renewed.
        for (secret, before, after) in [
            (&authority, &stored.authority, &planned.authority),
            (&server, &stored.server, &planned.server),
            (&client, &stored.client, &planned.client),
        ] {
            if before != after
                && let Some(pem) = after
            {
                self.secrets.write(secret, &pem.write()).await?;
            }
        }
        let server = planned.server.unwrap_or_default();
        Ok(TlsPem { certificate: server.certificate, key: server.key, authority: server.authority })
    }
}
