//! What the kubelet has reported: its podresources list, and the device streams it has opened.

use std::collections::{BTreeSet, HashMap};

use tessera_node::pod_resources::PodDevices;
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};

use super::{inventory::NodeGpus, pods::name_of};

/// The kubelet's last podresources list, and the resources it has asked for.
#[derive(Debug, Default)]
pub(super) struct KubeletView {
    listed: Vec<PodDevices>,
    /// Positions in `listed`, by namespace and name.
    by_name: HashMap<(String, String), Vec<usize>>,
    has_listed: bool,
    /// Names of the resources whose device streams it has opened.
    streams: BTreeSet<String>,
}

impl KubeletView {
    /// Returns the pods of the last list, with their devices.
    pub(super) fn listed(&self) -> &[PodDevices] {
        &self.listed
    }

    /// Returns whether the kubelet has listed its podresources at least once.
    pub(super) fn has_listed(&self) -> bool {
        self.has_listed
    }

    /// Takes over a list. Returns true if it differs from the last one.
    pub(super) fn replace_list(&mut self, listed: Vec<PodDevices>) -> bool {
        let is_first = !std::mem::replace(&mut self.has_listed, true);
        if !is_first && listed == self.listed {
            return false;
        }
        self.by_name.clear();
        for (position, pod) in listed.iter().enumerate() {
            let name = (pod.namespace.clone(), pod.name.clone());
            self.by_name.entry(name).or_default().push(position);
        }
        self.listed = listed;
        true
    }

    /// Returns the entries of a pod's name: two, while an earlier pod of that name terminates.
    pub(super) fn entries_named(&self, pod: &Pod) -> impl Iterator<Item = &PodDevices> {
        let (namespace, name) = name_of(pod);
        let positions = self.by_name.get(&(namespace.to_owned(), name.to_owned()));
        positions.into_iter().flatten().filter_map(|position| self.listed.get(*position))
    }

    /// Notes that the kubelet has opened the device stream of a resource.
    pub(super) fn open_stream(&mut self, resource: &str) {
        self.streams.insert(resource.to_owned());
    }

    pub(super) fn has_stream(&self, resource: &str) -> bool {
        self.streams.contains(resource)
    }

    pub(super) fn has_any_stream(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Returns containers that hold GPUs of another device plugin: namespace, pod, container.
    ///
    /// Device IDs of other plugins do not identify the GPUs.
    pub(super) fn served_by_others(&self, gpus: Option<&NodeGpus>) -> BTreeSet<(String, String, String)> {
        let is_ours = |name: &str, id: &String| {
            let known = Resource::named(name).zip(gpus);
            known.is_some_and(|(resource, gpus)| gpus.ids.read(resource, id).is_some())
        };
        let is_of_others = |(name, ids): (&String, &BTreeSet<String>)| {
            let is_gpu = name.starts_with("nvidia.com/") || name.contains("gpu");
            is_gpu && ids.iter().any(|id| !is_ours(name, id))
        };
        let mut served = BTreeSet::new();
        for pod in &self.listed {
            for container in pod.containers.iter().filter(|container| container.ids.iter().any(is_of_others))
            {
                served.insert((pod.namespace.clone(), pod.name.clone(), container.name.clone()));
            }
        }
        served
    }
}
