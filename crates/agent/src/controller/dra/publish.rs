//! Publishes the slice of this node and the health of its devices.
//!
//! The kubelet deletes the slices of all drivers when it starts, so the slice is written whenever it is not what it
//! should be. An API server drops fields silently whose feature gates are off. What was stored is therefore compared
//! with what was written.

use std::time::Duration;

use tessera_core::gpu::{Gpu, Health};
use tessera_node::dra::DeviceHealth;
use tessera_wire::{
    foreign::dra::SliceSpec,
    tessera::dra::{GpuDetails, NodeDevices, Sharing, device_name, is_shared, slice},
};

use super::super::{Action, Agent, EventTime, ShellError, Warning};

/// Delay before a slice that could not be written is written again.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// Generation of the node's pool. One slice has all devices, so a change needs no new generation.
const GENERATION: i64 = 1;

/// What is known about the slice of this node.
#[derive(Debug, Default)]
pub(super) struct SlicePublication {
    /// The slice as the API server has it; `None` before it has said so, `Some(None)` while there is no slice.
    observed: Option<Option<SliceSpec>>,
    /// The last slice that was written, and what the API server has stored of it.
    written: Option<(SliceSpec, SliceSpec)>,
    /// The slice that is being written.
    writing: Option<SliceSpec>,
    retry_at: Option<Duration>,
    /// Whether the API server keeps the fields of shared devices.
    sharing: Sharing,
    /// Whether the API server drops taints. Then broken GPUs are left out of the slice.
    drops_taints: bool,
    health: Option<Vec<DeviceHealth>>,
}

impl Agent {
    /// Takes in the slice as the watch reports it.
    pub(in super::super) fn on_slice(&mut self, observed: Option<SliceSpec>) {
        self.claims.slice.observed = Some(observed);
    }

    /// Takes in the result of a write.
    pub(in super::super) fn on_slice_written(
        &mut self,
        now: EventTime,
        outcome: Result<Box<SliceSpec>, ShellError>,
        actions: &mut Vec<Action>,
    ) {
        let publication = &mut self.claims.slice;
        let Some(sent) = publication.writing.take() else { return };
        match outcome {
            Ok(stored) => {
                publication.retry_at = None;
                publication.observed = Some(Some((*stored).clone()));
                self.check_stored(sent, *stored, actions);
            }
            Err(error) => {
                let message =
                    "cannot write the ResourceSlice of this node, will try again; claims cannot use its GPUs";
                actions.push(Action::Warn(Warning::new(message).node(&self.settings.node).error(&error)));
                publication.retry_at = Some(now.elapsed + RETRY_DELAY);
            }
        }
    }

    /// Writes the slice and publishes the health, where they are not what they should be.
    pub(in super::super) fn reconcile_slice(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        if !self.claims.is_offered || self.inventory.gpus().is_none() {
            return;
        }
        self.restore_claims(actions);
        self.publish_health(actions);
        let Some(node_uid) = self.publication.node_uid() else { return };
        let Some(wanted) = self.wanted_slice() else { return };
        let publication = &mut self.claims.slice;
        let is_due = publication.retry_at.is_none_or(|at| now.elapsed >= at);
        if publication.writing.is_some() || !is_due || !publication.is_stale(&wanted) {
            return;
        }
        publication.writing = Some(wanted.clone());
        publication.written = None;
        actions.push(Action::WriteSlice { node_uid, spec: Box::new(wanted) });
    }

    /// Compares what the API server has stored with what was written, and adapts the offer to what it keeps.
    fn check_stored(&mut self, sent: SliceSpec, stored: SliceSpec, actions: &mut Vec<Action>) {
        let publication = &mut self.claims.slice;
        if publication.sharing == Sharing::Shares && !is_shared(&stored) {
            publication.sharing = Sharing::WholeGpus;
            let message = "the API server drops the fields of shared devices, so claims get whole GPUs only; switch on the \
                           feature gate DRAConsumableCapacity of kube-apiserver and kube-scheduler";
            actions.push(Action::Warn(Warning::new(message).node(&self.settings.node)));
            return;
        }
        let taints =
            |slice: &SliceSpec| slice.devices.iter().map(|device| device.taints.len()).sum::<usize>();
        if !publication.drops_taints && taints(&stored) < taints(&sent) {
            publication.drops_taints = true;
            let message = "the API server drops taints of devices, so unhealthy GPUs are left out of the ResourceSlice; \
                           switch on the feature gate DRADeviceTaints of kube-apiserver and kube-scheduler";
            actions.push(Action::Warn(Warning::new(message).node(&self.settings.node)));
            return;
        }
        publication.written = Some((sent, stored));
    }

    /// Returns the slice that this node should have.
    fn wanted_slice(&self) -> Option<SliceSpec> {
        let gpus = self.inventory.gpus()?;
        let cordoned = self.cordoned();
        let with_cordon = |gpu: &Gpu| {
            let is_closed = gpu.health.is_healthy() && cordoned.contains(gpu.index);
            Gpu { health: if is_closed { Health::Cordoned } else { gpu.health }, ..gpu.clone() }
        };
        let offered: Vec<Gpu> = gpus.node.gpus().iter().map(with_cordon).collect();
        let pci = |address: &String| GpuDetails { pci_address: address.clone(), ..GpuDetails::default() };
        let details: Vec<GpuDetails> = gpus.found.pci.iter().map(pci).collect();
        let node = NodeDevices {
            node: &self.settings.node.0,
            gpus: &offered,
            topology: gpus.node.topology(),
            details: &details,
            driver_version: gpus.found.driver.as_deref(),
            sharing: self.claims.slice.sharing,
        };
        let mut wanted = slice(&node, GENERATION);
        if self.claims.slice.drops_taints {
            wanted.devices.retain(|device| device.taints.is_empty());
        }
        Some(wanted)
    }

    /// Sends the health of all devices to the kubelet, if it has changed.
    fn publish_health(&mut self, actions: &mut Vec<Action>) {
        let Some(gpus) = self.inventory.gpus() else { return };
        let health = gpus.node.gpus().iter().map(|gpu| DeviceHealth {
            pool: self.settings.node.to_string(),
            device: device_name(gpu.index),
            problem: gpu.health.problem().map(|problem| format!("the GPU is {problem}")),
        });
        let health: Vec<DeviceHealth> = health.collect();
        if self.claims.slice.health.as_ref() != Some(&health) {
            self.claims.slice.health = Some(health.clone());
            actions.push(Action::PublishHealth(health));
        }
    }
}

impl SlicePublication {
    /// Returns whether the slice must be written. What the API server made of an equal slice is not written again.
    fn is_stale(&self, wanted: &SliceSpec) -> bool {
        let Some(observed) = &self.observed else { return false };
        let Some(observed) = observed else { return true };
        let is_kept = self
            .written
            .as_ref()
            .is_some_and(|(asked, stored)| asked.offers_same(wanted) && stored.offers_same(observed));
        !observed.offers_same(wanted) && !is_kept
    }
}
