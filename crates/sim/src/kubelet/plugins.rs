//! Device plugins: registration and devices.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tessera_wire::kubelet::{
    HEALTHY,
    device_plugin::{
        Empty, RegisterRequest,
        device_plugin_client::DevicePluginClient,
        registration_server::{Registration, RegistrationServer},
    },
    plugin_registration::{InfoRequest, RegistrationStatus, registration_client::RegistrationClient},
};
use tokio::{net::UnixListener, task::JoinSet};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint, Server},
};

use super::{KubeletState, lock};

/// Interval of polling the plugin registry.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time after which a directory without changes counts as completely read.
const SETTLE_TIME: Duration = Duration::from_millis(100);

/// A registered plugin.
#[derive(Clone, Debug)]
pub(super) struct Plugin {
    pub(super) client: DevicePluginClient<Channel>,
    /// Health of every device by ID.
    devices: Arc<Mutex<BTreeMap<String, bool>>>,
}

impl Plugin {
    pub(super) fn healthy(&self) -> BTreeSet<String> {
        lock(&self.devices).iter().filter(|(_, healthy)| **healthy).map(|(id, _)| id.clone()).collect()
    }

    /// Returns the number of devices and of healthy devices.
    pub(super) fn count(&self) -> (usize, usize) {
        let devices = lock(&self.devices);
        (devices.len(), devices.values().filter(|healthy| **healthy).count())
    }
}

/// Reasons why a plugin does not become known.
#[derive(Debug, thiserror::Error)]
enum PluginError {
    #[error(transparent)]
    Connect(#[from] tonic::transport::Error),
    #[error("{0}")]
    Rpc(#[source] Box<Status>),
}

impl PluginError {
    fn rpc(status: Status) -> Self {
        Self::Rpc(Box::new(status))
    }
}

/// Deletes the sockets beside `kubelet.sock`, as a starting kubelet does.
pub(super) fn clear_sockets(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        match fs::remove_file(entry?.path()) {
            // The plugin may have removed its socket itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done?,
        }
    }
    Ok(())
}

/// Serves registrations at `kubelet.sock`.
pub(super) fn serve_registration(
    directory: &Path,
    state: Arc<KubeletState>,
    stop: &CancellationToken,
    tasks: &mut JoinSet<()>,
) -> io::Result<()> {
    let listener = UnixListener::bind(directory.join("kubelet.sock"))?;
    let service = RegistrationServer::new(Registrar { directory: directory.to_owned(), state });
    let stop = stop.clone();
    tasks.spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        let served = Server::builder().add_service(service);
        let _ended = served.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
    });
    Ok(())
}

struct Registrar {
    directory: PathBuf,
    state: Arc<KubeletState>,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let asked = request.into_inner();
        let socket = self.directory.join(&asked.endpoint);
        let state = self.state.clone();
        let connected = connect(&socket, asked.resource_name, state).await;
        connected.map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(Response::new(Empty {}))
    }
}

/// Connects to every socket that appears in the registry.
pub(super) fn watch_registry(
    directory: PathBuf,
    state: Arc<KubeletState>,
    stop: &CancellationToken,
    tasks: &mut JoinSet<()>,
) {
    let stop = stop.clone();
    tasks.spawn(async move {
        let mut known = BTreeSet::new();
        let mut settled = None;
        while !stop.is_cancelled() {
            // With many kubelets in one process, reading unchanged directories would take most of
            // the time.
            let changed = fs::metadata(&directory).and_then(|data| data.modified()).ok();
            if changed.is_some() && changed == settled {
                tokio::time::sleep(POLL_INTERVAL).await;
                continue;
            }
            let mut all_known = true;
            let entries = fs::read_dir(&directory).into_iter().flatten().filter_map(Result::ok);
            for path in entries.map(|entry| entry.path()) {
                let Ok(identity) =
                    fs::metadata(&path).map(|data| (path.clone(), data.ino(), data.ctime_nsec()))
                else {
                    continue;
                };
                if !known.contains(&identity) {
                    match register_from_registry(&path, state.clone()).await {
                        Ok(()) => drop(known.insert(identity)),
                        Err(_not_yet) => all_known = false,
                    }
                }
            }
            // File timestamps are coarse: a directory that changed just now may change again with
            // the same timestamp.
            let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|passed| passed > SETTLE_TIME);
            settled = changed.filter(|time| all_known && is_old(time));
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    });
}

async fn register_from_registry(socket: &Path, state: Arc<KubeletState>) -> Result<(), PluginError> {
    let mut client = RegistrationClient::new(dial(socket).await?);
    let info = client.get_info(InfoRequest {}).await.map_err(PluginError::rpc)?.into_inner();
    connect(socket, info.name, state).await?;
    let registered = RegistrationStatus { plugin_registered: true, error: String::new() };
    client.notify_registration_status(registered).await.map_err(PluginError::rpc)?;
    Ok(())
}

async fn dial(socket: &Path) -> Result<Channel, PluginError> {
    let address = format!("unix://{}", socket.display());
    Ok(Endpoint::from_shared(address)?.connect().await?)
}

/// Reads the plugin's options and opens its device stream. When the stream ends, all devices become
/// unhealthy.
async fn connect(socket: &Path, resource: String, state: Arc<KubeletState>) -> Result<(), PluginError> {
    let mut client = DevicePluginClient::new(dial(socket).await?)
        .max_decoding_message_size(4 << 20)
        .max_encoding_message_size(4 << 20);
    client.get_device_plugin_options(Empty {}).await.map_err(PluginError::rpc)?;
    let stream = client.list_and_watch(Empty {}).await.map_err(PluginError::rpc)?;
    let mut stream = stream.into_inner();
    let plugin = Plugin { client, devices: Arc::default() };
    lock(&state.plugins).insert(resource, plugin.clone());
    tokio::spawn(async move {
        while let Ok(Some(message)) = stream.message().await {
            let devices = message.devices.into_iter().map(|device| (device.id, device.health == HEALTHY));
            *lock(&plugin.devices) = devices.collect();
            state.device_updates.send_modify(|count| *count += 1);
        }
        lock(&plugin.devices).values_mut().for_each(|healthy| *healthy = false);
        state.device_updates.send_modify(|count| *count += 1);
    });
    Ok(())
}
