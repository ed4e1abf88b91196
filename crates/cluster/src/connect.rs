//! Making a client.

use std::path::{Path, PathBuf};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{BoxError, util::MapErrLayer};

use crate::causes::innermost;

/// No client could be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {}: {}", path.display(), innermost(why))]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: Box<KubeconfigError>,
    },
    /// A context nobody wrote down.
    #[error("context {0:?} does not exist; `kubectl config get-contexts` lists those there are")]
    Context(String),
    /// Neither in a pod nor with a kubeconfig in one of the usual places.
    #[error(
        "found no Kubernetes cluster to talk to: this is no pod, and {}; name a kubeconfig with --kubeconfig FILE or in KUBECONFIG",
        without_pod(.0)
    )]
    Nowhere(Box<kube::config::InferConfigError>),
    /// No URL.
    #[error("{url:?} is no URL")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        source: http::uri::InvalidUri,
    },
    /// The client library refused the configuration.
    #[error("cannot make a Kubernetes client")]
    Client(#[source] Box<kube::Error>),
}

/// A request did not get through. The client library tells neither where it went nor, at first sight, why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}", server.to_string().trim_end_matches('/'))]
struct Unreached {
    server: http::Uri,
    why: String,
}

/// What is the matter with the kubeconfig, where nothing else is to be had; it names the file.
fn without_pod(error: &kube::config::InferConfigError) -> String {
    let source = std::error::Error::source(error);
    match source.and_then(|source| source.downcast_ref()) {
        Some(KubeconfigError::ReadConfig(why, path)) => {
            format!("the kubeconfig {} cannot be read: {why}", path.display())
        }
        _ => source.map_or_else(|| error.to_string(), ToString::to_string),
    }
}

/// A client for an API server without TLS or authentication, as tests and demonstrations have.
pub fn connect_to(url: &str) -> Result<Client, ConnectError> {
    let url = url.parse().map_err(|source| ConnectError::Url { url: url.to_owned(), source })?;
    client(Config::new(url))
}

/// A client for the cluster of `kubeconfig`, or else of the pod or user this runs as.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    connect_in(kubeconfig, None).await
}

/// Likewise, in a context of the kubeconfig other than its current one.
pub async fn connect_in(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Client, ConnectError> {
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    let unusable = |path: &Path| {
        let path = path.to_owned();
        move |source: KubeconfigError| match (source, context) {
            (KubeconfigError::LoadContext(_), Some(context)) => ConnectError::Context(context.to_owned()),
            (source, _) => ConnectError::Kubeconfig { path, why: Box::new(source) },
        }
    };
    let config = match (kubeconfig, context) {
        (Some(path), _) => {
            let file = Kubeconfig::read_from(path).map_err(unusable(path))?;
            Config::from_custom_kubeconfig(file, &options).await.map_err(unusable(path))?
        }
        // A pod has no contexts: only a kubeconfig can be meant.
        (None, Some(_)) => {
            Config::from_kubeconfig(&options).await.map_err(unusable(Path::new("of the user")))?
        }
        (None, None) => Config::infer().await.map_err(|source| ConnectError::Nowhere(Box::new(source)))?,
    };
    client(config)
}

/// A client whose errors name the server.
fn client(config: Config) -> Result<Client, ConnectError> {
    let server = config.cluster_url.clone();
    let named = move |error: BoxError| -> BoxError {
        // Its own errors (a login that failed) say enough.
        if error.is::<kube::Error>() {
            return error;
        }
        Box::new(Unreached { server: server.clone(), why: innermost(&*error) })
    };
    let builder = ClientBuilder::try_from(config).map_err(|source| ConnectError::Client(Box::new(source)))?;
    Ok(builder.with_layer(&MapErrLayer::new(named)).build())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a user reads, with all causes.
    async fn refusal(kubeconfig: &Path) -> String {
        format!("{:#}", anyhow::Error::from(connect(Some(kubeconfig)).await.err().unwrap()))
    }

    #[tokio::test]
    async fn a_server_that_cannot_be_reached_is_named_with_the_reason() {
        let client = connect_to("http://127.0.0.1:1").unwrap();
        let error = crate::list::pod(&client, "team", "train").await.unwrap_err().to_string();
        let begin = "Unable to connect to the server: http://127.0.0.1:1: ";
        assert!(error.starts_with(begin) && error.to_lowercase().contains("refused"), "{error}");
    }

    #[tokio::test]
    async fn a_kubeconfig_that_cannot_be_used_is_named_once_with_its_cause() {
        let missing = refusal(Path::new("/does/not/exist")).await;
        assert_eq!(
            missing,
            "cannot use the kubeconfig /does/not/exist: No such file or directory (os error 2)"
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no: [yaml").unwrap();
        let broken = refusal(file.path()).await;
        let begin = format!("cannot use the kubeconfig {}: ", file.path().display());
        assert!(broken.starts_with(&begin) && broken.contains("line 1"), "{broken}");
        std::fs::write(file.path(), "apiVersion: v1\nkind: Config").unwrap();
        let empty = refusal(file.path()).await;
        assert!(empty.starts_with(&begin) && empty.contains("context"), "{empty}");
    }
}
