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
    let Served { plugin, resource, meeting } = served;
    let (directory, kubelet_socket) = match meeting {
        Meeting::PluginsRegistry(directory) => (directory, None),
        Meeting::KubeletSocket(directory) => {
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
        match &kubelet {
            None => while_it_holds(|| endpoint.is_intact(), &stop).await,
            Some(kubelet) => {
                kubelet.register_until_done(&resource, &endpoint, &stop).await;
                while_it_holds(|| endpoint.is_intact() && kubelet.is_the_same(), &stop).await;
            }
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

async fn while_it_holds(condition: impl Fn() -> bool, stop: &CancellationToken) {
    while !stop.is_cancelled() && condition() {
        pause(LOOK_EVERY, stop).await;
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
    tokio::select! {
        () = sleep(duration) => {}
        () = stop.cancelled() => {}
    }
}
