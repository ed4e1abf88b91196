//! Registers a plugin with the kubelet and keeps it registered.

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
    endpoint::Endpoint,
    service::{OPTIONS, Service},
};
use crate::file_identity::FileIdentity;

/// Time between two polls for a kubelet that is not running.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Timeout of a registration. The kubelet connects to the plugin during the call and allows 10 s
/// for that.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(12);

/// Pause after a failed registration, so that a kubelet that is down is not flooded with requests.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The way in which a plugin is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegistrationMode {
    /// The kubelet watches this directory (`plugins_registry` in its root directory) and connects
    /// to the plugin, also after its own restart. This mode is preferred where it exists.
    PluginsRegistry(PathBuf),
    /// The plugin connects to `kubelet.sock` in this directory (`/var/lib/kubelet/device-plugins`),
    /// again after each restart of the kubelet.
    KubeletSocket(PathBuf),
}

/// A plugin with its resource and its mode of registration.
#[derive(Debug, Clone)]
pub struct ServedPlugin<P> {
    /// Implementation of the plugin.
    pub plugin: Arc<P>,
    /// Resource name of the devices, such as `nvidia.com/gpu`.
    pub resource: String,
    /// Mode of registration.
    pub registration: RegistrationMode,
}

/// The socket of a plugin could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the socket {} of the device plugin for {resource}", socket.display())]
pub struct ServeError {
    resource: String,
    socket: PathBuf,
    source: io::Error,
}

/// Serves a plugin until `stop`. Returns earlier only if its socket cannot be opened.
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
                // The kubelet clears the directory before it listens, so a socket opened earlier
                // would be lost.
                None => {
                    pause(POLL_INTERVAL, &stop).await;
                    continue;
                }
            },
        };
        let service =
            Service { plugin: plugin.clone(), resource: resource.as_str().into(), stop: stop.child_token() };
        let (service_stop, router) = (service.stop.clone(), service.router());
        let endpoint = Endpoint::open(socket.clone(), service_stop, router).map_err(|source| ServeError {
            resource: resource.clone(),
            socket: socket.clone(),
            source,
        })?;
        // The watch starts before the first check, so that no change is missed.
        let changes = DirectoryWatch::on(&directory);
        if let Some(kubelet) = &kubelet {
            kubelet.register_until_done(&resource, &endpoint, &stop).await;
        }
        while !stop.is_cancelled() && endpoint.is_intact() && kubelet.as_ref().is_none_or(Kubelet::is_running)
        {
            let _stopped = stop.run_until_cancelled(changes.changed()).await;
        }
        endpoint.close().await;
    }
    Ok(())
}

/// The kubelet that listened on a socket at a given time. A restarted kubelet is a different one.
struct Kubelet<'a> {
    socket: &'a Path,
    identity: FileIdentity,
}

impl<'a> Kubelet<'a> {
    fn at(socket: &'a Path) -> Option<Self> {
        FileIdentity::of(socket).map(|identity| Self { socket, identity })
    }

    fn is_running(&self) -> bool {
        FileIdentity::of(self.socket) == Some(self.identity)
    }

    /// Registers the plugin. Retries until it succeeds, the kubelet restarts, or the socket is
    /// lost.
    async fn register_until_done(&self, resource: &str, endpoint: &Endpoint, stop: &CancellationToken) {
        while !stop.is_cancelled() && endpoint.is_intact() && self.is_running() {
            match register(self.socket, resource).await {
                Ok(()) => {
                    tracing::info!(%resource, "registered the device plugin with the kubelet");
                    return;
                }
                Err(error) => {
                    tracing::debug!(%resource, %error, "cannot register with the kubelet; will retry");
                    pause(RETRY_INTERVAL, stop).await;
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
        Remote::from_shared(format!("unix://{}", kubelet_socket.display()))?.timeout(REGISTER_TIMEOUT);
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
