//! Reads and writes Secrets that exist already. Tessera may not create Secrets.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client};

/// A Secret could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot read or write Secret {namespace}/{name}")]
pub struct SecretError {
    namespace: String,
    name: String,
    #[source]
    source: Box<kube::Error>,
}

impl SecretError {
    /// Returns whether another client has written the Secret at the same time.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 409)
    }
}

/// The Secrets of a namespace.
#[derive(Clone)]
pub struct Secrets {
    namespace: String,
    client: Client,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secrets").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// A Secret as it was read. A write fails if the Secret has changed since.
#[derive(Clone, Debug)]
pub struct StoredSecret(Secret);

impl StoredSecret {
    /// Returns a text of the Secret, or an empty one if it is absent.
    #[must_use]
    pub fn text(&self, key: &str) -> String {
        let data = self.0.data.as_ref().and_then(|data| data.get(key));
        data.map(|value| String::from_utf8_lossy(&value.0).into_owned()).unwrap_or_default()
    }
}

impl Secrets {
    /// Returns the Secrets of this namespace.
    #[must_use]
    pub fn of(client: Client, namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), client }
    }

    fn api(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn error(&self, name: &str) -> impl FnOnce(kube::Error) -> SecretError {
        let (namespace, name) = (self.namespace.clone(), name.to_owned());
        move |source| SecretError { namespace, name, source: Box::new(source) }
    }

    /// Reads a Secret.
    pub async fn read(&self, name: &str) -> Result<StoredSecret, SecretError> {
        Ok(StoredSecret(self.api().get(name).await.map_err(self.error(name))?))
    }

    /// Replaces the data of a Secret.
    pub async fn write(
        &self,
        stored: &StoredSecret,
        data: &BTreeMap<&'static str, String>,
    ) -> Result<(), SecretError> {
        let mut secret = stored.0.clone();
        let bytes = |text: &String| ByteString(text.clone().into_bytes());
        secret.data = Some(data.iter().map(|(key, text)| ((*key).to_owned(), bytes(text))).collect());
        let name = secret.metadata.name.clone().unwrap_or_default();
        self.api().replace(&name, &PostParams::default(), &secret).await.map_err(self.error(&name))?;
        Ok(())
    }
}
