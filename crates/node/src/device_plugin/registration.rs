//! Getting a plugin known to the kubelet, and keeping it known.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use tessera_wire::kubelet::{
    DEVICE_PLUGIN_VERSION,
    device_plugin::{RegisterRequest, registration_client::RegistrationClient},
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint as Remote;

use super::{
    DevicePlugin,
    endpoint::{Endpoint, FileIdentity},
    service::{OPTIONS, Service},
};

/// How often the sockets are looked at. A restarted kubelet admits its first pod about 0.4 s after it listens; a plugin that
/// is not back by then costs those pods their life.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The kubelet dials back while it registers a plugin, which it allows 10 s.
const REGISTER_WITHIN: Duration = Duration::from_secs(12);

/// The pause after a registration that failed, so that a kubelet that is down is not hammered.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Where plugin and kubelet meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meeting {
    /// The kubelet watches this directory (`plugins_registry` in its root directory) and comes to the plugin, also after
    /// its own restart. The better way wherever it exists.
    PluginsRegistry(PathBuf),
    /// The plugin goes to `kubelet.sock` in this directory (`/var/lib/kubelet/device-plugins`), again after each restart.
    KubeletSocket(PathBuf),
}

/// What to serve, and where.
#[derive(Debug, Clone)]
pub struct Served<P> {
    /// Who answers.
    pub plugin: Arc<P>,
    /// The resource its devices are, such as `nvidia.com/gpu`.
    pub resource: String,
    /// Where the kubelet finds it.
    pub meeting: Meeting,
}

/// A socket could not be served.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve the device plugin of {resource} on {}", socket.display())]
pub struct ServeError {
    resource: String,
    socket: PathBuf,
    source: io::Error,
}

/// Serves a plugin until `stop`. Comes back earlier only when its socket cannot be made.
pub async fn serve<P: DevicePlugin>(served: Served<P>, stop: CancellationToken) -> Result<(), ServeError> {
    let Served {
        plugin,
        resource,
        meeting,
    } = served;
    let (directory, kubelet_socket) = match meeting {
        Meeting::PluginsRegistry(directory) => (directory, None),
        Meeting::KubeletSocket(directory) => {
            let socket = directory.join("kubelet.sock");
            (directory, Some(socket))
        }
    };
    let socket_name = format!("{}.sock", resource.replace('/', "-"));
    let socket = directory.join(&socket_name);
    let shared_name: Arc<str> = resource.as_str().into();

    while !stop.is_cancelled() {
        // The kubelet clears the directory before it listens: a socket made earlier would be lost.
        let kubelet = match &kubelet_socket {
            None => None,
            Some(path) => match FileIdentity::of(path) {
                Some(identity) => Some((path, identity)),
                None => {
                    pause(LOOK_EVERY, &stop).await;
                    continue;
                }
            },
        };
        let service = Service {
            plugin: plugin.clone(),
            resource: shared_name.clone(),
            stop: stop.child_token(),
        };
        let endpoint = Endpoint::open(socket.clone(), service).map_err(|source| ServeError {
            resource: resource.clone(),
            socket: socket.clone(),
            source,
        })?;

        let mut registered = kubelet.is_none();
        let mut next_try = Instant::now();
        let same_kubelet = || kubelet.is_none_or(|(path, identity)| FileIdentity::of(path) == Some(identity));
        while !stop.is_cancelled() && endpoint.is_intact() && same_kubelet() {
            if let Some((path, _)) = kubelet
                && !registered
                && Instant::now() >= next_try
            {
                match register(path, &socket_name, &resource).await {
                    Ok(()) => {
                        registered = true;
                        tracing::info!(%resource, "registered with the kubelet");
                    }
                    Err(error) => {
                        next_try = Instant::now() + RETRY_AFTER;
                        tracing::debug!(%resource, %error, "not registered yet");
                    }
                }
            }
            pause(LOOK_EVERY, &stop).await;
        }
        endpoint.close().await;
    }
    Ok(())
}

async fn register(
    kubelet_socket: &std::path::Path,
    endpoint: &str,
    resource: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let remote =
        Remote::from_shared(format!("unix://{}", kubelet_socket.display()))?.timeout(REGISTER_WITHIN);
    let mut client = RegistrationClient::new(remote.connect().await?);
    client
        .register(RegisterRequest {
            version: DEVICE_PLUGIN_VERSION.into(),
            endpoint: endpoint.into(),
            resource_name: resource.into(),
            options: Some(OPTIONS),
        })
        .await?;
    Ok(())
}

async fn pause(duration: Duration, stop: &CancellationToken) {
    tokio::select! {
        () = sleep(duration) => {}
        () = stop.cancelled() => {}
    }
}
