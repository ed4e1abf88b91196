//! Two fake GPUs, `a` and `b`, of two units each.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tessera_node::device_plugin::{Allocation, DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest};
use tessera_wire::kubelet::device_plugin::{CdiDevice, Mount};
use tokio::sync::watch;

/// CDI kind of the GPUs.
pub(crate) const CDI_KIND: &str = "e2e.tessera.dev/gpu";

/// Directory in containers with the files written for them.
pub(crate) const GRANTS_IN_CONTAINER: &str = "/tmp/grants";

/// A device plugin that fills GPU `b` first, so that an ignored preference is detected.
#[derive(Debug)]
pub(crate) struct FakeGpus {
    /// Name of the plugin in containers that hold devices of both plugins.
    name: &'static str,
    /// Directory that is mounted into containers.
    grants: PathBuf,
    devices: watch::Sender<Vec<PluginDevice>>,
    streams: AtomicUsize,
    refusal: Mutex<Option<String>>,
}

impl FakeGpus {
    pub(crate) fn new(name: &'static str, grants: PathBuf) -> Self {
        let device = |id: &str| PluginDevice { id: id.into(), healthy: true, numa_node: None };
        let devices = watch::Sender::new(["a-0", "a-1", "b-0", "b-1"].map(device).to_vec());
        Self { name, grants, devices, streams: AtomicUsize::new(0), refusal: Mutex::new(None) }
    }

    /// Returns how often a kubelet has connected.
    pub(crate) fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Rejects all containers from now on.
    pub(crate) fn refuse(&self, reason: &str) {
        *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
    }
}

impl DevicePlugin for FakeGpus {
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>> {
        self.streams.fetch_add(1, Ordering::Relaxed);
        self.devices.subscribe()
    }

    async fn prefer(&self, wish: PreferenceRequest) -> Result<Vec<String>, PluginRefusal> {
        let (mut on_b, mut on_a): (Vec<_>, Vec<_>) =
            wish.available.into_iter().partition(|id| id.starts_with('b'));
        on_b.sort();
        on_a.sort();
        Ok(on_b.into_iter().chain(on_a).take(wish.count).collect())
    }

    async fn allocate(&self, mut ids: Vec<String>) -> Result<Allocation, PluginRefusal> {
        if let Some(reason) = &*self.refusal.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(PluginRefusal(reason.clone()));
        }
        ids.sort();
        let gpu = ids.first().and_then(|id| id.split('-').next()).unwrap_or_default();
        Ok(Allocation {
            envs: [(format!("E2E_{}", self.name.to_uppercase()), ids.join(","))].into(),
            mounts: vec![Mount {
                container_path: format!("{GRANTS_IN_CONTAINER}/{}", self.name),
                host_path: self.grants.join("current").display().to_string(),
                read_only: true,
            }],
            cdi_devices: vec![CdiDevice { name: format!("{CDI_KIND}={gpu}") }],
            ..Allocation::default()
        })
    }

    async fn pre_start(&self, mut ids: Vec<String>) -> Result<(), PluginRefusal> {
        ids.sort();
        let grant = format!("granted {}\n", ids.join(","));
        fs::write(self.grants.join("current"), grant).map_err(|error| PluginRefusal(error.to_string()))
    }
}
