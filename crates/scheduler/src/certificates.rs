//! The certificates of the verbs, kept in Secrets: an authority, the server's certificate, and kube-scheduler's.
//!
//! [`plan`] decides what has to be renewed and is free of IO. [`Certificates`] reads and writes the Secrets, which
//! have the keys of cert-manager's Secrets. [`OwnCertificates`] are files that something else keeps.

pub mod plan;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use tessera_cluster::secrets::{SecretError, Secrets};
use tessera_cluster::{Client, with_causes};
use tessera_serve::authority::AuthorityError;
use tessera_serve::files::Files;
use tessera_serve::{ClientCheck, Tls, TlsError, TlsFiles, TlsPem, check_own_client};

use self::plan::{AUTHORITY, CLIENT, Pem, SERVER, SERVER_NAME, Stored};
use crate::server::CallSender;

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

/// The certificates in use.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Current {
    server: TlsPem,
    /// The one that kube-scheduler shows, and a replica that forwards a call of kube-scheduler.
    client: TlsPem,
}

impl Certificates {
    /// Uses the Secrets of this namespace.
    #[must_use]
    pub fn of(client: Client, namespace: &str, client_name: &str) -> Self {
        Self { secrets: Secrets::of(client, namespace), client_name: client_name.to_owned() }
    }

    /// Makes or renews the certificates if necessary. The returned acceptor and the sender of calls always use the
    /// newest ones.
    pub async fn follow(self) -> Result<(Tls, CallSender), CertificateError> {
        let mut current = self.ensure().await?;
        let tls = Tls::for_client(current.server.clone(), &self.client_name)?;
        let sender = CallSender::new(&current.client)?;
        let (updated, updated_sender) = (tls.clone(), sender.clone());
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(CHECK_INTERVAL).await;
                let renewed = match self.ensure().await {
                    Ok(renewed) if renewed == current => continue,
                    Ok(renewed) => updated
                        .update(renewed.server.clone())
                        .and_then(|()| updated_sender.update(&renewed.client))
                        .map(|()| renewed)
                        .map_err(Into::into),
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
        Ok((tls, sender))
    }

    /// Returns valid certificates, after all certificates that are due have been renewed.
    async fn ensure(&self) -> Result<Current, CertificateError> {
        let mut attempts = 1..=MAX_ATTEMPTS;
        loop {
            attempts.next();
            match self.try_ensure().await {
                Err(CertificateError::Secret(error)) if error.is_conflict() && !attempts.is_empty() => {}
                outcome => return outcome,
            }
        }
    }

    async fn try_ensure(&self) -> Result<Current, CertificateError> {
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
        let tls = |pem: Option<Pem>| {
            let Pem { certificate, key, authority, .. } = pem.unwrap_or_default();
            TlsPem { certificate, key, authority }
        };
        Ok(Current { server: tls(planned.server), client: tls(planned.client) })
    }
}

/// Files with a certificate of the verbs that something else makes and renews, such as cert-manager.
#[derive(Clone, Debug)]
pub struct OwnCertificates {
    /// The chain of the server's certificate.
    pub certificate: PathBuf,
    /// Private key of that certificate.
    pub key: PathBuf,
    /// The authority of kube-scheduler's certificate, and of the server's if replicas forward calls.
    pub authority: PathBuf,
    /// DNS name in kube-scheduler's certificate.
    pub client_name: String,
}

impl OwnCertificates {
    /// Uses the files now and whenever they change. Without a sender, replicas that wait cannot forward calls, so only
    /// the leader is ready.
    pub fn follow(self) -> Result<(Tls, Option<CallSender>), TlsError> {
        let Self { certificate, key, authority, client_name } = self;
        let mut files = Files::new(&[&certificate, &key, &authority]);
        let pem = pem_of(files.read_if_changed()?.unwrap_or_default());
        let clients = ClientCheck { authority, name: client_name.clone() };
        let tls = Tls::follow(TlsFiles { certificate, key, clients: Some(clients) })?;
        if let Err(error) = check_own_client(&pem, &client_name, SERVER_NAME) {
            let error = with_causes(&error);
            tracing::warn!(
                %error, name = %client_name,
                "replicas that wait cannot forward calls, so only the leader is ready; give the certificate of --tls-cert \
                 also this DNS name and the usage clientAuth"
            );
            return Ok((tls, None));
        }
        let sender = CallSender::new(&pem)?;
        let updated = sender.clone();
        tokio::spawn(files.follow(move |contents| {
            if let Err(error) = updated.update(&pem_of(contents)) {
                let error = with_causes(&error);
                tracing::warn!(%error, "cannot forward calls with the new certificate; the previous one stays in use");
            }
        }));
        Ok((tls, Some(sender)))
    }
}

/// Names the files of [`OwnCertificates`], in the order of its fields.
fn pem_of(files: &[Vec<u8>]) -> TlsPem {
    let file = |number: usize| files.get(number).map(|file| String::from_utf8_lossy(file).into_owned());
    let file = |number| file(number).unwrap_or_default();
    TlsPem { certificate: file(0), key: file(1), authority: file(2) }
}
