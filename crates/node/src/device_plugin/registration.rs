//! Getting a plugin known to the kubelet, and keeping it known.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tessera_wire::kubelet::{
    DEVICE_PLUGIN_VERSION,
    device_plugin::{RegisterRequest, registration_client::RegistrationClient},
};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint as Remote;

use super::{
    DevicePlugin,
    directory::DirectoryWatch,
    endpoint::{Endpoint, FileIdentity},
    service::{OPTIONS, Service},
};

/// How often a kubelet that is not there is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The kubelet dials back while it registers a plugin, which it allows 10 s.
const REGISTER_WITHIN: Duration = Duration::from_secs(12);

/// The pause after a registration that failed, so that a kubelet that is down is not hammered.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Where plugin and kubelet meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegistrationMode {
    /// The kubelet watches this directory (`plugins_registry` in its root directory) and comes to the plugin, also after
    /// its own restart. The better way wherever it exists.
    PluginsRegistry(PathBuf),
    /// The plugin goes to `kubelet.sock` in this directory (`/var/lib/kubelet/device-plugins`), again after each restart.
    KubeletSocket(PathBuf),
}

/// What to serve, and where.
#[derive(Debug, Clone)]
pub struct ServedPlugin<P> {
    /// Who answers.
    pub plugin: Arc<P>,
    /// The resource its devices are, such as `nvidia.com/gpu`.
    pub resource: String,
    /// Where the kubelet finds it.
    pub registration: RegistrationMode,
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
pub async fn serve<P: DevicePlugin>(
    served: ServedPlugin<P>,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let ServedPlugin { plugin, resource, registration } = served;
    let (directory, kubelet_socket) = match registration {
        RegistrationMode::PluginsRegistry(directory) => (directory, None),
        RegistrationMode::KubeletSocket(directory) => {
            let kubelet_socket = directory.join("kubelet.sock");
            (directory, Some(kubelet_socket))
        }
    };
    let socket = directory.join(socket_name(&resource));

    while !stop.is_cancelled() {
        let kubelet = match &kubelet_socket {
            None => None,
            Some(path) => match Kubelet::at(path) {
                Some(kubelet) => Some(kubelet),
                // It clears the directory before it listens: a socket made earlier would be lost.
                None => {
                    pause(LOOK_EVERY, &stop).await;
                    continue;
                }
            },
        };
        let service =
            Service { plugin: plugin.clone(), resource: resource.as_str().into(), stop: stop.child_token() };
        let endpoint = Endpoint::open(socket.clone(), service).map_err(|source| ServeError {
            resource: resource.clone(),
            socket: socket.clone(),
            source,
        })?;
        // Before anything is looked at, so that no change is missed.
        let changes = DirectoryWatch::on(&directory);
        if let Some(kubelet) = &kubelet {
            kubelet.register_until_done(&resource, &endpoint, &stop).await;
        }
        while !stop.is_cancelled()
            && endpoint.is_intact()
            && kubelet.as_ref().is_none_or(Kubelet::is_the_same)
        {
            let _stopped = stop.run_until_cancelled(changes.may_have_changed()).await;
        }
        endpoint.close().await;
    }
    Ok(())
}

/// The kubelet that listened on a socket when we looked. After a restart it is another one.
struct Kubelet<'a> {
    socket: &'a Path,
    identity: FileIdentity,
}

impl<'a> Kubelet<'a> {
    fn at(socket: &'a Path) -> Option<Self> {
        FileIdentity::of(socket).map(|identity| Self { socket, identity })
    }

    fn is_the_same(&self) -> bool {
        FileIdentity::of(self.socket) == Some(self.identity)
    }

    /// Tries until it worked, or there is no point any more.
    async fn register_until_done(&self, resource: &str, endpoint: &Endpoint, stop: &CancellationToken) {
        while !stop.is_cancelled() && endpoint.is_intact() && self.is_the_same() {
            match register(self.socket, resource).await {
                Ok(()) => {
                    tracing::info!(%resource, "registered with the kubelet");
                    return;
                }
                Err(error) => {
                    tracing::debug!(%resource, %error, "not registered yet");
                    pause(RETRY_AFTER, stop).await;
                }
            }
        }
    }
}

fn socket_name(resource: &str) -> String {
    format!("{}.sock", resource.replace('/', "-"))
}

async fn register(
    kubelet_socket: &Path,
    resource: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let remote =
        Remote::from_shared(format!("unix://{}", kubelet_socket.display()))?.timeout(REGISTER_WITHIN);
    let mut client = RegistrationClient::new(remote.connect().await?);
    client
        .register(RegisterRequest {
            version: DEVICE_PLUGIN_VERSION.into(),
            endpoint: socket_name(resource),
            resource_name: resource.into(),
            options: Some(OPTIONS),
        })
        .await?;
    Ok(())
}

async fn pause(duration: Duration, stop: &CancellationToken) {
    let _stopped = stop.run_until_cancelled(sleep(duration)).await;
}
