//! Serves claims of dynamic resource allocation to the kubelet.
//!
//! Implement [`ClaimDriver`] and run it with [`serve`], which opens two sockets: one in `plugins_registry`, by
//! which the kubelet finds the driver, and one in `plugins/DRIVER`, at which the kubelet calls it.

mod service;

use std::{
    fmt, fs,
    future::Future,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::service::Service;
use crate::device_plugin::{directory::DirectoryWatch, endpoint::Endpoint};

/// Answers to the kubelet's calls about claims.
///
/// Both calls have a deadline of 45 seconds. Both may be repeated, and must have the same result then.
pub trait ClaimDriver: Send + Sync + 'static {
    /// Returns the health of all devices, with updates after every change.
    fn health(&self) -> watch::Receiver<Vec<DeviceHealth>>;

    /// Prepares the devices of a claim before the first container that uses it starts. After an error the kubelet
    /// tries again, about a minute later.
    fn prepare(
        &self,
        claim: ClaimReference,
    ) -> impl Future<Output = Result<Vec<PreparedDevice>, ClaimRefusal>> + Send;

    /// Releases the devices of a claim that no pod of the node uses any more. The claim may be gone.
    fn unprepare(&self, claim: ClaimReference) -> impl Future<Output = Result<(), ClaimRefusal>> + Send;
}

/// A claim, as the kubelet names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimReference {
    /// UID of the claim.
    pub uid: String,
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
}

/// One prepared device of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Name of the request in the claim, without the alternative.
    pub request: String,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Qualified names of the CDI devices that the container runtime injects.
    pub cdi_names: Vec<String>,
    /// Identifies the share of the device, if it has one.
    pub share_id: Option<String>,
}

/// Health of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Reason why the device should not be used, or `None` if it is healthy.
    pub problem: Option<String>,
}

/// Reason why a driver rejected a call, shown in the events of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRefusal(pub String);

impl fmt::Display for ClaimRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A driver with its name and the kubelet's directories.
#[derive(Debug, Clone)]
pub struct ServedDriver<D> {
    /// Implementation of the driver.
    pub driver: Arc<D>,
    /// Name of the driver, as slices and classes have it.
    pub name: String,
    /// Directory in which the kubelet looks for registration sockets: `plugins_registry` in its root directory.
    pub registry: PathBuf,
    /// Directory for the sockets of drivers: `plugins` in the kubelet's root directory.
    pub plugins: PathBuf,
}

/// A socket of a driver could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the socket {} of the driver {driver}", socket.display())]
pub struct ServeDriverError {
    driver: String,
    socket: PathBuf,
    source: io::Error,
}

/// Serves a driver until `stop`. Returns earlier only if a socket cannot be opened.
pub async fn serve<D: ClaimDriver>(
    served: ServedDriver<D>,
    stop: CancellationToken,
) -> Result<(), ServeDriverError> {
    let ServedDriver { driver, name, registry, plugins } = served;
    let directory = plugins.join(&name);
    let (calls, registration) = (directory.join("dra.sock"), registry.join(format!("{name}-reg.sock")));
    let failed = |socket: &Path| {
        let (driver, socket) = (name.clone(), socket.to_owned());
        move |source| ServeDriverError { driver, socket, source }
    };
    create_private(&directory).map_err(failed(&calls))?;
    while !stop.is_cancelled() {
        let service = Service {
            driver: driver.clone(),
            name: name.as_str().into(),
            endpoint: calls.display().to_string().into(),
            stop: stop.child_token(),
        };
        let changes = (DirectoryWatch::on(&directory), DirectoryWatch::on(&registry));
        // The kubelet calls as soon as it finds the registration, so that comes last.
        let served = Endpoint::open(calls.clone(), service.stop.clone(), service.calls_router())
            .map_err(failed(&calls))?;
        let registered =
            Endpoint::open(registration.clone(), service.stop.clone(), service.registration_router())
                .map_err(failed(&registration))?;
        while !stop.is_cancelled() && served.is_intact() && registered.is_intact() {
            tokio::select! {
                () = stop.cancelled() => {}
                () = changes.0.changed() => {}
                () = changes.1.changed() => {}
            }
        }
        registered.close().await;
        served.close().await;
    }
    Ok(())
}

/// Creates the directory of the driver's socket. Only root may call the driver.
fn create_private(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))
}
