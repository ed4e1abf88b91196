//! The device plugin of one profile of MIG instances.
//!
//! An instance is a whole device: kube-scheduler counts instances, and the kubelet chooses among equal ones.
//! The answers follow from the instances alone, so nothing has to be remembered across restarts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tessera_node::{
    device_plugin::{
        Allocation, DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest, RegistrationMode,
        ServedPlugin, serve,
    },
    gpus::GpuInstance,
};
use tessera_wire::kubelet::container_response::InjectionSettings;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use super::{Message, Messages, TICK_INTERVAL, with_causes};
use crate::controller::{Event, InstanceOffer};

/// The plugins of all profiles.
pub(super) struct InstancePlugins {
    injection: InjectionSettings,
    registration: RegistrationMode,
    messages: Messages,
    plugins: BTreeMap<String, Arc<InstancePlugin>>,
}

struct InstancePlugin {
    resource: String,
    messages: Messages,
    injection: InjectionSettings,
    devices: watch::Sender<Vec<PluginDevice>>,
    instances: watch::Sender<Vec<GpuInstance>>,
}

impl InstancePlugins {
    pub(super) fn new(
        injection: InjectionSettings,
        registration: RegistrationMode,
        messages: Messages,
    ) -> Self {
        Self { injection, registration, messages, plugins: BTreeMap::new() }
    }

    /// Publishes these resources. The plugin of a new one is served until `stop`; a resource without instances
    /// has no devices any more.
    pub(super) fn publish(
        &mut self,
        offers: Vec<InstanceOffer>,
        tasks: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) {
        let offered: BTreeSet<&str> = offers.iter().map(|offer| offer.resource.as_str()).collect();
        for (_, plugin) in self.plugins.iter().filter(|(name, _)| !offered.contains(name.as_str())) {
            plugin.publish(Vec::new(), Vec::new());
        }
        for InstanceOffer { resource, devices, instances } in offers {
            if let Some(plugin) = self.plugins.get(&resource) {
                plugin.publish(devices, instances);
                continue;
            }
            let plugin = Arc::new(InstancePlugin {
                resource: resource.clone(),
                messages: self.messages.clone(),
                injection: self.injection.clone(),
                devices: watch::Sender::new(devices),
                instances: watch::Sender::new(instances),
            });
            self.plugins.insert(resource.clone(), plugin.clone());
            tasks.spawn(serve_until(plugin, resource, self.registration.clone(), stop.clone()));
        }
    }
}

/// Serves a plugin, and tries again if its socket cannot be opened.
async fn serve_until(
    plugin: Arc<InstancePlugin>,
    resource: String,
    registration: RegistrationMode,
    stop: CancellationToken,
) {
    while !stop.is_cancelled() {
        let (plugin, resource, registration) = (plugin.clone(), resource.clone(), registration.clone());
        if let Err(error) = serve(ServedPlugin { plugin, resource, registration }, stop.clone()).await {
            tracing::warn!(error = with_causes(&error), "cannot offer MIG instances; will retry");
            let _stopped = stop.run_until_cancelled(tokio::time::sleep(TICK_INTERVAL)).await;
        }
    }
}

impl InstancePlugin {
    fn publish(&self, devices: Vec<PluginDevice>, instances: Vec<GpuInstance>) {
        self.instances.send_replace(instances);
        self.devices.send_if_modified(|known| {
            let has_changed = *known != devices;
            *known = devices;
            has_changed
        });
    }
}

impl DevicePlugin for InstancePlugin {
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>> {
        let opened = Event::InstanceStreamOpened(self.resource.clone());
        let _ended = self.messages.send(Message::Event(opened));
        self.devices.subscribe()
    }

    /// Prefers instances in the order of the GPUs, so that whole GPUs stay free for a change of profiles.
    async fn prefer(&self, request: PreferenceRequest) -> Result<Vec<String>, PluginRefusal> {
        let devices = self.devices.borrow();
        let is_new = |id: &&String| request.available.contains(id) && !request.required.contains(id);
        let ordered = devices.iter().map(|device| &device.id).filter(is_new);
        Ok(request.required.iter().chain(ordered).take(request.count).cloned().collect())
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<Allocation, PluginRefusal> {
        let known = self.instances.borrow();
        let (mut uuids, mut nodes) = (Vec::new(), BTreeSet::new());
        for id in ids {
            let Some(instance) = known.iter().find(|instance| *instance.uuid.0 == *id) else {
                return Err(PluginRefusal(format!(
                    "MIG instance {id} does not exist any more; create the pod again"
                )));
            };
            uuids.push(id);
            nodes.extend(instance.device_nodes.iter().cloned());
        }
        Ok(self.injection.instances_response(&uuids, nodes.into_iter()))
    }

    async fn pre_start(&self, _: Vec<String>) -> Result<(), PluginRefusal> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tessera_core::units::{GpuIndex, MiB};
    use tokio::sync::mpsc;

    use super::*;

    fn plugin(cdi_kind: Option<&str>) -> InstancePlugin {
        let instance = |number: u32| GpuInstance {
            gpu: GpuIndex(3),
            gpu_uuid: "GPU-3".into(),
            uuid: format!("MIG-{number}").as_str().into(),
            profile: "1g.10gb".into(),
            memory: MiB(9728),
            gpu_instance: 7 + number,
            compute_instance: 0,
            device_nodes: vec!["/dev/nvidia3".into(), format!("/dev/nvidia-caps/nvidia-cap{}", 66 + number)],
        };
        let device = |number| PluginDevice { id: format!("MIG-{number}"), healthy: true, numa_node: None };
        let cdi_kind = cdi_kind.map(str::to_owned);
        InstancePlugin {
            resource: "nvidia.com/mig-1g.10gb".to_owned(),
            messages: mpsc::unbounded_channel().0,
            injection: InjectionSettings { device_nodes: true, cdi_kind, ..InjectionSettings::default() },
            devices: watch::Sender::new((0..3).map(device).collect()),
            instances: watch::Sender::new((0..3).map(instance).collect()),
        }
    }

    #[tokio::test]
    async fn a_container_gets_its_instances_and_their_device_nodes() {
        let given = plugin(None).allocate(vec!["MIG-0".into(), "MIG-2".into()]).await.unwrap();
        assert_eq!(given.envs["NVIDIA_VISIBLE_DEVICES"], "MIG-0,MIG-2");
        let nodes: Vec<&str> = given.devices.iter().map(|device| device.host_path.as_str()).collect();
        let caps = ["/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap68", "/dev/nvidia3"];
        assert_eq!(nodes, [&caps[..], &["/dev/nvidiactl", "/dev/nvidia-uvm"]].concat());

        let by_cdi = plugin(Some("nvidia.com/gpu")).allocate(vec!["MIG-1".into()]).await.unwrap();
        assert_eq!(by_cdi.envs["NVIDIA_VISIBLE_DEVICES"], "void");
        assert_eq!((by_cdi.cdi_devices[0].name.as_str(), by_cdi.devices.len()), ("nvidia.com/gpu=MIG-1", 0));

        let gone = plugin(None).allocate(vec!["MIG-9".into()]).await.unwrap_err();
        assert_eq!(gone.0, "MIG instance MIG-9 does not exist any more; create the pod again");
    }

    #[tokio::test]
    async fn instances_are_preferred_in_order_after_the_required_ones() {
        let wish = |required: &[&str], count| PreferenceRequest {
            available: ["MIG-2", "MIG-1", "MIG-0"].map(str::to_owned).to_vec(),
            required: required.iter().map(|id| (*id).to_owned()).collect(),
            count,
        };
        let plugin = plugin(None);
        assert_eq!(plugin.prefer(wish(&[], 2)).await.unwrap(), ["MIG-0", "MIG-1"]);
        assert_eq!(plugin.prefer(wish(&["MIG-2"], 2)).await.unwrap(), ["MIG-2", "MIG-0"]);
    }
}
