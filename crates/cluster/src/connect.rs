//! Creates clients for the Kubernetes API.

use std::path::{Path, PathBuf};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{BoxError, util::MapErrLayer};

use crate::causes::innermost;

/// Reason why no client could be created.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {}: {}", path.display(), innermost(why))]
    Kubeconfig {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Cause, from the client library.
        why: Box<KubeconfigError>,
    },
    /// The kubeconfig is not YAML of the expected form. The error carries no text of the file, because
    /// the file contains credentials.
    #[error("cannot use the kubeconfig{}: it is not valid YAML of a kubeconfig{}; `kubectl config view` checks it", of(path), at(*place))]
    Malformed {
        /// Path of the kubeconfig, if it is known.
        path: Option<PathBuf>,
        /// Line and column, if they are known.
        place: Option<(u64, u64)>,
    },
    /// The kubeconfig has no context of this name.
    #[error("context {0:?} does not exist; `kubectl config get-contexts` lists those there are")]
    Context(String),
    /// The process does not run in a pod, and no kubeconfig is in one of the usual places.
    #[error(
        "found no Kubernetes cluster: this process does not run in a pod, and {}; name a kubeconfig with --kubeconfig FILE or in KUBECONFIG",
        without_pod(.0)
    )]
    Nowhere(Box<kube::config::InferConfigError>),
    /// The address of the API server is not a URL.
    #[error("{url:?} is not a URL; write http://HOST:PORT")]
    Url {
        /// Address as given.
        url: String,
        /// Cause, from the URL parser.
        source: http::uri::InvalidUri,
    },
    /// The client library refused the configuration.
    #[error("cannot create a Kubernetes client")]
    Client(#[source] Box<kube::Error>),
}

/// A request did not reach the server. The client library's own error names neither the server nor,
/// at the top level, the cause.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}", server.to_string().trim_end_matches('/'))]
struct Unreached {
    server: http::Uri,
    why: String,
}

fn of(path: &Option<PathBuf>) -> String {
    path.as_ref().map(|path| format!(" {}", path.display())).unwrap_or_default()
}

fn at(place: Option<(u64, u64)>) -> String {
    place.map(|(line, column)| format!(" at line {line}, column {column}")).unwrap_or_default()
}

/// Returns the error without the text of the file, if the file could not be parsed.
fn malformed(error: &KubeconfigError, path: Option<&Path>) -> Option<ConnectError> {
    let KubeconfigError::Parse(why) = error else { return None };
    let place = why.location().map(|location| (location.line(), location.column()));
    Some(ConnectError::Malformed { path: path.map(Path::to_owned), place })
}

/// Returns what is wrong with the kubeconfig, with its path, for a process outside a pod.
fn without_pod(error: &kube::config::InferConfigError) -> String {
    let source = std::error::Error::source(error);
    match source.and_then(|source| source.downcast_ref()) {
        Some(KubeconfigError::ReadConfig(why, path)) => {
            format!("the kubeconfig {} cannot be read: {why}", path.display())
        }
        _ => source.map_or_else(|| error.to_string(), ToString::to_string),
    }
}

/// Returns a client for an API server without TLS or authentication, as tests and demos use.
pub fn connect_to(url: &str) -> Result<Client, ConnectError> {
    let url = url.parse().map_err(|source| ConnectError::Url { url: url.to_owned(), source })?;
    client(Config::new(url))
}

/// Returns a client for the cluster of `kubeconfig`. Without one, uses the files that `KUBECONFIG` lists.
/// If `KUBECONFIG` is empty or missing, uses the user's default kubeconfig or the pod's service account.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    connect_in(kubeconfig, None).await
}

/// Returns a client as [`connect`] does, for a given context of the kubeconfig instead of its
/// current one.
pub async fn connect_in(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Client, ConnectError> {
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    let unusable = |path: &Path| {
        let path = path.to_owned();
        move |source: KubeconfigError| match (source, context) {
            (KubeconfigError::LoadContext(_), Some(context)) => ConnectError::Context(context.to_owned()),
            (source, _) => malformed(&source, Some(&path))
                .unwrap_or_else(|| ConnectError::Kubeconfig { path, why: Box::new(source) }),
        }
    };
    let listed = std::env::var_os("KUBECONFIG").filter(|files| !files.is_empty());
    let config = match (kubeconfig, context, &listed) {
        (Some(path), ..) => {
            let file = Kubeconfig::read_from(path).map_err(unusable(path))?;
            Config::from_custom_kubeconfig(file, &options).await.map_err(unusable(path))?
        }
        // A user who lists files or names a context does not mean the cluster of the pod.
        (None, _, Some(files)) => {
            Config::from_kubeconfig(&options).await.map_err(unusable(Path::new(files)))?
        }
        (None, Some(_), None) => {
            Config::from_kubeconfig(&options).await.map_err(unusable(Path::new("of the user")))?
        }
        (None, None, None) => Config::infer().await.map_err(|source| {
            let cause = std::error::Error::source(&source).and_then(|cause| cause.downcast_ref());
            cause
                .and_then(|cause| malformed(cause, None))
                .unwrap_or_else(|| ConnectError::Nowhere(Box::new(source)))
        })?,
    };
    client(config)
}

/// Returns a client whose errors name the server, and which sends each request once.
///
/// The client library would repeat requests after 429, 503 and 504, for minutes and without a word. A Binding that a
/// server has stored before it answered 504 would then end with 409, as if another scheduler had bound the pod, and an
/// eviction that a disruption budget refuses would seem to hang. All callers try again themselves and say why.
fn client(mut config: Config) -> Result<Client, ConnectError> {
    config.default_retry = false;
    let server = config.cluster_url.clone();
    let named = move |error: BoxError| -> BoxError {
        // Errors of the client library itself, such as a failed login, are already complete.
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

    /// Returns the message a user sees, with all causes.
    async fn refusal(kubeconfig: &Path) -> String {
        format!("{:#}", anyhow::Error::from(connect(Some(kubeconfig)).await.err().unwrap()))
    }

    #[tokio::test]
    async fn names_an_unreachable_server_and_the_reason() {
        let client = connect_to("http://127.0.0.1:1").unwrap();
        let error = crate::list::pod(&client, "team", "train").await.unwrap_err().to_string();
        let begin = "Unable to connect to the server: http://127.0.0.1:1: ";
        assert!(error.starts_with(begin) && error.to_lowercase().contains("refused"), "{error}");
    }

    /// A server that is overloaded, shuts down or times out gets no second request behind the caller's back.
    #[tokio::test]
    async fn sends_each_request_once() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        for code in [429, 503, 504] {
            let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let client = connect_to(&format!("http://{}", server.local_addr().unwrap())).unwrap();
            let requests = std::sync::atomic::AtomicUsize::new(0);
            let serve = async {
                loop {
                    let (mut connection, _) = server.accept().await.unwrap();
                    let mut begin = [0; 4096];
                    while connection.read(&mut begin).await.is_ok_and(|bytes| bytes > 0) {
                        requests.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let status = format!(r#"{{"kind":"Status","status":"Failure","code":{code}}}"#);
                        let answer = format!(
                            "HTTP/1.1 {code} No\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{status}",
                            status.len()
                        );
                        connection.write_all(answer.as_bytes()).await.unwrap();
                    }
                }
            };
            let outcome = tokio::select! {
                outcome = crate::list::pod(&client, "team", "train") => outcome,
                () = serve => unreachable!("the server never ends"),
            };
            assert!(outcome.is_err());
            assert_eq!(requests.into_inner(), 1, "{code}");
        }
    }

    #[tokio::test]
    async fn names_an_unusable_kubeconfig_once_with_its_cause() {
        let missing = refusal(Path::new("/does/not/exist")).await;
        assert_eq!(
            missing,
            "cannot use the kubeconfig /does/not/exist: No such file or directory (os error 2)"
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no: [yaml").unwrap();
        let broken = refusal(file.path()).await;
        let begin = format!("cannot use the kubeconfig {}: ", file.path().display());
        assert!(broken.starts_with(&begin) && broken.contains("at line 1, column "), "{broken}");
        std::fs::write(file.path(), "apiVersion: v1\nkind: Config").unwrap();
        let empty = refusal(file.path()).await;
        assert!(empty.starts_with(&begin) && empty.contains("context"), "{empty}");
    }

    #[tokio::test]
    async fn an_error_in_a_kubeconfig_shows_no_text_of_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let user = "apiVersion: v1\nkind: Config\nusers:\n- name: u\n  user:\n    token: SECRET";
        for broken in [
            format!("{user}\n   bad: [\n"),
            format!("{user}: x\n"),
            format!("{user}\nclusters: SECRET\n"),
            format!("{user}\ncontexts:\n- name: SECRET\n  context: SECRET\n"),
            "SECRET".to_owned(),
            "token: \"SECRET".to_owned(),
        ] {
            std::fs::write(file.path(), &broken).unwrap();
            let error = connect(Some(file.path())).await.err().unwrap();
            for text in
                [format!("{error}"), format!("{error:?}"), format!("{:#}", anyhow::Error::from(error))]
            {
                assert!(!text.contains("SECRET"), "{broken:?}: {text}");
            }
        }
        std::fs::write(file.path(), format!("{user}\nclusters: SECRET\n")).unwrap();
        let text = refusal(file.path()).await;
        assert!(text.contains("at line 7, column 11"), "{text}");
    }
}
