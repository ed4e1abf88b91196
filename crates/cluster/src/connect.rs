//! Making a client.

use std::path::{Path, PathBuf};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// No client could be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<KubeconfigError>,
    },
    /// A context nobody wrote down.
    #[error("context {0:?} does not exist; `kubectl config get-contexts` lists those there are")]
    Context(String),
    /// Neither in a pod nor with a kubeconfig in one of the usual places.
    #[error("found no Kubernetes cluster to talk to: not in a pod, and no usable kubeconfig")]
    Nowhere(#[source] Box<kube::config::InferConfigError>),
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

/// A client for an API server without TLS or authentication, as tests and demonstrations have.
pub fn connect_to(url: &str) -> Result<Client, ConnectError> {
    let url = url.parse().map_err(|source| ConnectError::Url { url: url.to_owned(), source })?;
    Client::try_from(Config::new(url)).map_err(|source| ConnectError::Client(Box::new(source)))
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
            (source, _) => ConnectError::Kubeconfig { path, source: Box::new(source) },
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
    Client::try_from(config).map_err(|source| ConnectError::Client(Box::new(source)))
}
