//! Prepares and releases claims.
//!
//! A force-deleted pod frees its claim before its containers have ended, so a claim may arrive before the kubelet
//! has released the one that it replaces. Such a claim waits inside the call: after a refusal the kubelet would try
//! again only a minute later.

use std::time::Duration;

use tessera_node::dra::{ClaimReference, PreparedDevice};
use tessera_wire::{
    foreign::dra::ResourceClaim,
    kubelet::cdi,
    tessera::dra::{
        ClaimHold, DRIVER, PreparedClaim, PreparedGpu, ShareConfig, claim_holds, device_name,
        request_directory, share_config,
    },
};

use super::{
    super::{Action, Agent, CallAnswer, CallId, EventTime, ShellError, Warning},
    ClaimError, claim_grant,
    files::claim_files,
    index_of, main_request,
};

/// How long a claim waits for room on its GPUs. The kubelet gives up after 45 seconds.
const ROOM_TIMEOUT: Duration = Duration::from_secs(30);

/// A claim that is being prepared.
#[derive(Debug)]
pub(super) struct Preparing {
    /// Calls that wait for the answer. The kubelet may repeat a call.
    calls: Vec<CallId>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The claim is being read.
    Reading,
    /// The claim waits for room on its GPUs until `deadline`.
    Waiting { claim: Box<PreparedClaim>, deadline: Duration },
    /// The files of the claim are being written.
    Storing,
}

impl Agent {
    /// Answers NodePrepareResources for one claim, now or later.
    pub(in super::super) fn on_prepare(
        &mut self,
        call: CallId,
        claim: ClaimReference,
        actions: &mut Vec<Action>,
    ) {
        if let Some(preparing) = self.claims.preparing.get_mut(&claim.uid) {
            preparing.calls.push(call);
            return;
        }
        if self.claims.prepared.contains_key(&claim.uid) {
            let answer = self.prepared_devices(&claim.uid);
            actions.push(Action::Answer(call, CallAnswer::Prepared(answer)));
            return;
        }
        let preparing = Preparing { calls: vec![call], stage: Stage::Reading };
        self.claims.preparing.insert(claim.uid.clone(), preparing);
        actions.push(Action::ReadClaim(claim));
    }

    /// Continues with a claim that was read.
    pub(in super::super) fn on_claim_read(
        &mut self,
        now: EventTime,
        reference: &ClaimReference,
        read: Result<Box<ResourceClaim>, ShellError>,
        actions: &mut Vec<Action>,
    ) {
        if !self.claims.preparing.contains_key(&reference.uid) {
            return;
        }
        let name = || format!("{}/{}", reference.namespace, reference.name);
        let claim = read
            .map_err(|error| ClaimError::Unreadable { claim: name(), error })
            .and_then(|claim| self.allocated_gpus(reference, &claim));
        match claim {
            Ok(claim) => self.store_or_wait(Box::new(claim), now.elapsed + ROOM_TIMEOUT, now, actions),
            Err(error) => self.finish_preparing(&reference.uid, Err(error), actions),
        }
    }

    /// Notes that the files of a claim were written, or why not.
    pub(in super::super) fn on_claim_stored(
        &mut self,
        uid: &str,
        outcome: Result<(), ShellError>,
        actions: &mut Vec<Action>,
    ) {
        let Some(claim) = self.claims.prepared.get(uid) else { return };
        let name = format!("{}/{}", claim.namespace, claim.name);
        let is_new = self.claims.preparing.contains_key(uid);
        match outcome {
            Ok(()) => {
                let answer = self.prepared_devices(uid);
                self.finish_preparing(uid, answer, actions);
            }
            Err(error) if is_new => {
                self.claims.prepared.remove(uid);
                self.invalidate();
                self.finish_preparing(uid, Err(ClaimError::Files { claim: name, error }), actions);
            }
            Err(error) => {
                let message =
                    "cannot write the files of a claim of an earlier agent; new containers that use it fail";
                actions.push(Action::Warn(Warning::new(message).detail(name).error(&error)));
            }
        }
    }

    /// Answers NodeUnprepareResources for one claim. A claim that is not known was released before.
    pub(in super::super) fn on_unprepare(
        &mut self,
        call: CallId,
        claim: &ClaimReference,
        actions: &mut Vec<Action>,
    ) {
        let name = || format!("{}/{}", claim.namespace, claim.name);
        self.finish_preparing(&claim.uid, Err(ClaimError::Released { claim: name() }), actions);
        if self.claims.prepared.contains_key(&claim.uid) {
            self.claims.removing.insert(call, claim.uid.clone());
            actions.push(Action::RemoveClaim(call, claim.uid.clone()));
        } else {
            actions.push(Action::Answer(call, CallAnswer::Unprepared(Ok(()))));
        }
    }

    /// Notes that the files of a released claim were removed, or why not.
    pub(in super::super) fn on_claim_removed(
        &mut self,
        now: EventTime,
        call: CallId,
        outcome: Result<(), ShellError>,
        actions: &mut Vec<Action>,
    ) {
        let Some(uid) = self.claims.removing.remove(&call) else { return };
        let name = self.claims.prepared.get(&uid).map(|claim| format!("{}/{}", claim.namespace, claim.name));
        if outcome.is_ok() && self.claims.prepared.remove(&uid).is_some() {
            self.invalidate();
        }
        let claim = name.unwrap_or_default();
        let answer = outcome.map_err(|error| ClaimError::Files { claim, error });
        actions.push(Action::Answer(call, CallAnswer::Unprepared(answer)));
        self.retry_waiting_claims(now, actions);
    }

    /// Tries the claims again that wait for room, and refuses those that have waited too long.
    pub(in super::super) fn retry_waiting_claims(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        let is_waiting = |preparing: &Preparing| matches!(preparing.stage, Stage::Waiting { .. });
        let waiting = self.claims.preparing.iter().filter(|(_, preparing)| is_waiting(preparing));
        for uid in waiting.map(|(uid, _)| uid.clone()).collect::<Vec<_>>() {
            let Some(preparing) = self.claims.preparing.get_mut(&uid) else { continue };
            if let Stage::Waiting { claim, deadline } =
                std::mem::replace(&mut preparing.stage, Stage::Reading)
            {
                self.store_or_wait(claim, deadline, now, actions);
            }
        }
    }

    /// Takes over the claims that an earlier agent has prepared.
    pub(in super::super) fn on_claims_on_disk(&mut self, claims: Vec<PreparedClaim>) {
        self.claims.prepared.extend(claims.into_iter().map(|claim| (claim.uid.clone(), claim)));
        self.invalidate();
    }

    /// Writes the files of claims again that an earlier agent has prepared, once the GPUs are known. The kubelet does
    /// not ask for them again, and a restart of the node has removed most of them.
    pub(in super::super) fn restore_claims(&mut self, actions: &mut Vec<Action>) {
        let Some(gpus) = self.inventory.gpus() else { return };
        if std::mem::replace(&mut self.claims.are_restored, true) {
            return;
        }
        let labels = self.publication.node_labels();
        for claim in self.claims.prepared.values() {
            let name = || format!("{}/{}", claim.namespace, claim.name);
            if !claim.devices.iter().all(|device| index_of(gpus, device).is_some()) {
                let message = "a GPU of a prepared claim is gone; containers that use the claim fail, delete their pods";
                actions.push(Action::Warn(Warning::new(message).detail(name())));
                continue;
            }
            match claim_files(claim, &self.settings, gpus, labels) {
                Ok(files) => actions.push(Action::StoreClaim(Box::new(files))),
                Err(error) => {
                    let message =
                        "cannot prepare a claim of an earlier agent again; new containers that use it fail";
                    actions.push(Action::Warn(Warning::new(message).detail(name()).error(&error)));
                }
            }
        }
    }

    /// Checks a claim and returns what it holds on this node.
    fn allocated_gpus(
        &self,
        reference: &ClaimReference,
        claim: &ResourceClaim,
    ) -> Result<PreparedClaim, ClaimError> {
        let name = || format!("{}/{}", reference.namespace, reference.name);
        if claim.metadata.uid != reference.uid {
            return Err(ClaimError::Replaced { claim: name() });
        }
        if claim.results(DRIVER).next().is_none() {
            return Err(ClaimError::NotAllocated { claim: name() });
        }
        if claim.status.reserved_for.is_empty() {
            return Err(ClaimError::NotReserved { claim: name() });
        }
        let gpus = self.inventory.gpus().ok_or(ClaimError::GpusUnknown)?;
        let holds = claim_holds(claim, &gpus.node)
            .map_err(|reason| ClaimError::Allocation { claim: name(), reason })?;
        let device = |ClaimHold { request, gpu, hold, share_id }: ClaimHold| {
            let ShareConfig { cores_limit } = share_config(claim, &request)
                .map_err(|reason| ClaimError::Config { claim: name(), reason })?;
            let found = gpus.node.gpu(gpu).ok_or(ClaimError::GpusUnknown)?;
            let device = device_name(gpu);
            match found.health.problem() {
                Some(problem) if hold.is_some() => {
                    Err(ClaimError::Unhealthy { claim: name(), device, problem })
                }
                _ => {
                    let gpu = found.uuid.clone();
                    Ok(PreparedGpu { request, device, gpu, hold, cores_limit, share_id })
                }
            }
        };
        Ok(PreparedClaim {
            uid: reference.uid.clone(),
            namespace: reference.namespace.clone(),
            name: reference.name.clone(),
            devices: holds.into_iter().map(device).collect::<Result<_, _>>()?,
        })
    }

    /// Has the files of a claim written if it fits, or lets it wait for room.
    fn store_or_wait(
        &mut self,
        claim: Box<PreparedClaim>,
        deadline: Duration,
        now: EventTime,
        actions: &mut Vec<Action>,
    ) {
        let uid = claim.uid.clone();
        let full = self.full_device(&claim);
        let Some(preparing) = self.claims.preparing.get_mut(&uid) else { return };
        if let Some(device) = full {
            if now.elapsed >= deadline {
                let claim = format!("{}/{}", claim.namespace, claim.name);
                self.finish_preparing(&uid, Err(ClaimError::Full { claim, device }), actions);
            } else {
                preparing.stage = Stage::Waiting { claim, deadline };
            }
            return;
        }
        let labels = self.publication.node_labels();
        let files = match self.inventory.gpus() {
            Some(gpus) => claim_files(&claim, &self.settings, gpus, labels),
            None => Err(ClaimError::GpusUnknown),
        };
        match files {
            Ok(files) => {
                preparing.stage = Stage::Storing;
                self.claims.prepared.insert(uid, *claim);
                self.invalidate();
                actions.push(Action::StoreClaim(Box::new(files)));
            }
            Err(error) => self.finish_preparing(&uid, Err(error), actions),
        }
    }

    /// Returns the first device of a claim that has no room for it beside all claims and pods of the node.
    fn full_device(&mut self, claim: &PreparedClaim) -> Option<String> {
        let ledger = self.ledger();
        let gpus = self.inventory.gpus()?;
        let mut state = ledger.node(&self.settings.node)?.clone();
        for device in &claim.devices {
            if let (Some(index), Some(hold)) = (index_of(gpus, device), device.hold) {
                if !state.fits(index, hold) {
                    return Some(device.device.clone());
                }
                let alone = PreparedClaim { devices: vec![device.clone()], ..claim.clone() };
                state.add(&claim_grant(&alone, &self.settings.node, gpus));
            }
        }
        None
    }

    /// Answers all calls that wait for a claim.
    fn finish_preparing(
        &mut self,
        uid: &str,
        answer: Result<Vec<PreparedDevice>, ClaimError>,
        actions: &mut Vec<Action>,
    ) {
        let Some(Preparing { calls, .. }) = self.claims.preparing.remove(uid) else { return };
        let answer = |call| Action::Answer(call, CallAnswer::Prepared(answer.clone()));
        actions.extend(calls.into_iter().map(answer));
    }

    /// Returns the answer for a prepared claim.
    fn prepared_devices(&self, uid: &str) -> Result<Vec<PreparedDevice>, ClaimError> {
        let claim = self.claims.prepared.get(uid).ok_or(ClaimError::GpusUnknown)?;
        let mut answered: Vec<&str> = Vec::new();
        let device = |device: &PreparedGpu| PreparedDevice {
            request: main_request(device).to_owned(),
            pool: self.settings.node.to_string(),
            device: device.device.clone(),
            cdi_names: self
                .settings
                .injection
                .cdi_kind
                .iter()
                .map(|kind| format!("{kind}={}", device.gpu))
                .collect(),
            share_id: device.share_id.clone(),
        };
        let mut devices = Vec::new();
        for one in &claim.devices {
            let mut prepared = device(one);
            // The CDI device of a request comes once, with the first of its GPUs.
            if !answered.contains(&one.request.as_str()) {
                answered.push(&one.request);
                let name = cdi::claim_device(&claim.uid, &request_directory(&one.request));
                prepared.cdi_names.insert(0, format!("{}={name}", cdi::CLAIM_KIND));
            }
            devices.push(prepared);
        }
        Ok(devices)
    }
}
