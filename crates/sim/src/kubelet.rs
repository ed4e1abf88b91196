//! A kubelet's device manager on its real sockets, without containers.
//!
//! Device plugins register and answer calls as with a real kubelet. The behaviour was observed on
//! Kubernetes 1.28 to 1.36:
//!
//! - Pods are admitted one at a time, init containers first. The resources of a container are
//!   allocated in random order.
//! - A pod is listed from the start of its admission, with the devices it holds so far. Ordinary
//!   init containers are never listed. A rejected pod disappears from the list at once.
//! - A preference that is too short or wrong is silently filled up with random devices.
//! - Containers reuse the devices of init containers without asking the plugin for a preference.
//! - A restart forgets the plugins and keeps the allocations. It deletes the sockets beside
//!   `kubelet.sock`, but not those in `plugins_registry`.

mod admission;
mod containers;
mod listing;
pub mod node;
mod plugins;
pub mod situations;
mod status;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::admission::{Admitted, AllocationError, KubeletError};
pub use self::containers::{BUSY, GREEDY, IDLE};
use self::{listing::RateLimit, plugins::Plugin};

/// A running kubelet. Dropping it ends it like a kill.
#[derive(Debug)]
pub struct Kubelet {
    root: PathBuf,
    state: Arc<KubeletState>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
    /// Locked while a pod is admitted.
    admitting: tokio::sync::Mutex<()>,
}

/// Allocations that survive a restart of the kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    pods: BTreeMap<String, PodEntry>,
}

/// The devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldDevices {
    /// UID of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// Resource name, such as `nvidia.com/gpu`.
    pub resource: String,
    /// IDs of the devices.
    pub ids: BTreeSet<String>,
}

/// The allocations of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PodEntry {
    namespace: String,
    name: String,
    containers: Vec<ContainerEntry>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ContainerEntry {
    name: String,
    /// False for ordinary init containers, which podresources does not list.
    listed: bool,
    ids: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Debug)]
struct KubeletState {
    allocations: Mutex<Checkpoint>,
    plugins: Mutex<BTreeMap<String, Plugin>>,
    limit: Mutex<RateLimit>,
    lists: std::sync::atomic::AtomicUsize,
    /// Number of device updates from plugins.
    device_updates: tokio::sync::watch::Sender<u64>,
    /// State of the random choices, which are the same in every run.
    dice: Mutex<u64>,
}

impl Kubelet {
    /// Starts a kubelet in `root`, the counterpart of `/var/lib/kubelet`, with the allocations of
    /// an earlier one.
    pub fn start(root: PathBuf, checkpoint: Checkpoint, seed: u64) -> io::Result<Self> {
        let state = Arc::new(KubeletState {
            allocations: Mutex::new(checkpoint),
            plugins: Mutex::default(),
            limit: Mutex::new(RateLimit::new()),
            lists: std::sync::atomic::AtomicUsize::new(0),
            device_updates: tokio::sync::watch::Sender::new(0),
            dice: Mutex::new(seed.wrapping_mul(2).wrapping_add(1)),
        });
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        for directory in ["device-plugins", "plugins_registry", "pod-resources"] {
            std::fs::create_dir_all(root.join(directory))?;
        }
        plugins::clear_sockets(&root.join("device-plugins"))?;
        listing::serve(&root.join("pod-resources/kubelet.sock"), state.clone(), &stop, &mut tasks)?;
        plugins::serve_registration(&root.join("device-plugins"), state.clone(), &stop, &mut tasks)?;
        plugins::watch_registry(root.join("plugins_registry"), state.clone(), &stop, &mut tasks);
        Ok(Self { root, state, stop, tasks, admitting: tokio::sync::Mutex::new(()) })
    }

    /// Stops the kubelet and returns its allocations.
    pub async fn stop(mut self) -> Checkpoint {
        self.stop.cancel();
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
        let _gone = std::fs::remove_file(self.root.join("device-plugins/kubelet.sock"));
        let _gone = std::fs::remove_file(self.root.join("pod-resources/kubelet.sock"));
        lock(&self.state.allocations).clone()
    }

    /// Returns the number of healthy devices of a resource.
    #[must_use]
    pub fn allocatable(&self, resource: &str) -> usize {
        let plugins = lock(&self.state.plugins);
        plugins.get(resource).map_or(0, |plugin| plugin.healthy().len())
    }

    /// Returns the number of devices of a resource and the number of healthy ones. Returns `None`
    /// without a plugin.
    fn devices(&self, resource: &str) -> Option<(usize, usize)> {
        lock(&self.state.plugins).get(resource).map(Plugin::count)
    }

    /// Returns a receiver that changes with every device update of a plugin.
    #[must_use]
    pub fn device_updates(&self) -> tokio::sync::watch::Receiver<u64> {
        self.state.device_updates.subscribe()
    }

    /// Returns all held devices with their pods and containers.
    #[must_use]
    pub fn held_devices(&self) -> Vec<HeldDevices> {
        let allocations = lock(&self.state.allocations);
        let mut all = Vec::new();
        for (uid, pod) in &allocations.pods {
            for container in &pod.containers {
                for (resource, ids) in &container.ids {
                    let (resource, ids) = (resource.clone(), ids.clone());
                    all.push(HeldDevices {
                        pod: uid.clone(),
                        container: container.name.clone(),
                        resource,
                        ids,
                    });
                }
            }
        }
        all
    }

    /// Returns how often podresources was listed.
    #[must_use]
    pub fn lists(&self) -> usize {
        self.state.lists.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Removes a pod and frees its devices.
    pub fn remove(&self, uid: &str) {
        lock(&self.state.allocations).pods.remove(uid);
    }

    /// Returns the devices of a container, by resource.
    #[must_use]
    pub fn holds(&self, uid: &str, container: &str) -> BTreeMap<String, BTreeSet<String>> {
        let allocations = lock(&self.state.allocations);
        let containers = allocations.pods.get(uid).into_iter().flat_map(|pod| &pod.containers);
        containers.filter(|c| c.name == container).map(|c| c.ids.clone()).next().unwrap_or_default()
    }
}

impl KubeletState {
    /// Draws a number below `bound`.
    fn roll(&self, bound: usize) -> usize {
        let mut dice = lock(&self.dice);
        *dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(*dice >> 33).unwrap_or_default() % bound.max(1)
    }

    fn shuffle<T>(&self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.roll(last + 1));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
