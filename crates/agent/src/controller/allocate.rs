//! Answers `GetPreferredAllocation` and `Allocate`: which devices a container should take, and what
//! it is given with the devices that the kubelet chose.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{
    gpu_set::GpuSet,
    grant::{ContainerGrant, Hold, PodGrant},
    node::NodeState,
    placement::place,
    request::{ContainerRole, PodRequest, Request, Share},
    units::{GpuIndex, MiB, MilliCpu, PodUid},
};
use tessera_node::device_plugin::{Allocation, PreferenceRequest};
use tessera_wire::{
    foreign::{
        dialect::{hami, vcuda},
        objects::{Container, Pod},
        pod_spec::Claim,
    },
    kubelet::{
        container_response::{GrantedContainer, InjectionSettings, disables_cgpu},
        device_id::Resource,
    },
    tessera::gpu_wishes::{self, GpuWishes},
};

use super::{
    Action, AgentSettings, CallError, OPT_OUT, Warning,
    admission::Admissions,
    devices::{OfferedDevices, check_devices},
    inventory::NodeGpus,
    isolation::{Enforcement, NotEnforced, asks_to_opt_out},
    pods::{Pods, display_name},
};

/// What one container needs, and what is already decided for it.
pub(super) struct ContainerRequest {
    pub(super) claim: Claim,
    /// Pod in the form `namespace/name`, for messages.
    pub(super) pod_name: String,
    /// GPUs of the container, if another resource of it has fixed them.
    pub(super) fixed: Option<GpuSet>,
    /// Some of the container's GPUs, if another resource of it lies on fewer than all of them.
    pub(super) partly_fixed: GpuSet,
    /// GPUs that the scheduler granted.
    granted: GpuSet,
}

impl ContainerRequest {
    pub(super) fn gpu_count(&self) -> usize {
        self.claim.request.gpu_count()
    }

    /// Returns how many of `count` devices must lie on each GPU, or `None` if any distribution will
    /// do.
    pub(super) fn per_gpu(&self, resource: Resource, count: usize) -> Option<usize> {
        match (resource, self.claim.request) {
            (Resource::VcudaMemory, Request::Whole(_)) => None,
            _ => Some(count / self.gpu_count().max(1)),
        }
    }
}

/// Decides which GPUs a container gets.
pub(super) struct Allocator<'a> {
    pub(super) settings: &'a AgentSettings,
    pub(super) gpus: &'a NodeGpus,
    /// GPUs that only pods with a grant may use.
    pub(super) cordoned: GpuSet,
    pub(super) pods: &'a Pods,
    pub(super) admissions: &'a Admissions,
    pub(super) node_labels: Option<&'a BTreeMap<String, String>>,
}

impl Allocator<'_> {
    /// Returns what a container needs of `resource`.
    pub(super) fn request(
        &self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
    ) -> Result<ContainerRequest, CallError> {
        let pod = self.pod(uid)?;
        let claims = pod.spec.claims(self.gpus.ids.unit())?;
        let claim = claims.into_iter().find(|claim| claim.container == container);
        let claim = claim.ok_or_else(|| CallError::NoGpuRequested(container.to_owned()))?;
        let others = Resource::of(claim.dialect).filter(|other| *other != resource);
        let mut given =
            others.filter_map(|other| Some((other, self.admissions.recorded(uid, container, other)?)));
        let named: Option<GpuSet> =
            given.next().map(|(other, ids)| self.gpus.of_ids(other, ids).into_iter().collect());
        let granted = self.pods.annotated(uid).iter().find(|granted| granted.container == container);
        let granted = granted.map(ContainerGrant::gpus).unwrap_or_default();
        let pod_name = display_name(pod);
        let mut request =
            ContainerRequest { claim, pod_name, fixed: None, partly_fixed: GpuSet::EMPTY, granted };
        match named {
            // A few blocks of memory beside whole GPUs need not lie on each of the GPUs.
            Some(named) if named.len() < request.gpu_count() => request.partly_fixed = named,
            named => request.fixed = named,
        }
        Ok(request)
    }

    /// Returns the devices that a container should take. `state` is what is left for it.
    pub(super) fn preferred_devices(
        &self,
        uid: &PodUid,
        request: &ContainerRequest,
        state: &NodeState,
        resource: Resource,
        wish: &PreferenceRequest,
    ) -> Result<Vec<String>, CallError> {
        self.enforcement(uid, request)?;
        let offered = OfferedDevices::new(self.gpus, resource, wish)?;
        let gpus = match request.fixed {
            Some(fixed) => fixed,
            None => self.choose_gpus(uid, request, state, (resource, wish.count), &offered)?,
        };
        let picked = offered.pick(gpus, wish.count, request.per_gpu(resource, wish.count));
        picked.ok_or_else(|| CallError::TooFewDevices {
            pod: request.pod_name.clone(),
            container: request.claim.container.clone(),
            count: wish.count,
            resource,
            gpus,
        })
    }

    /// Verifies the devices that the kubelet chose, and returns environment, mounts and device
    /// nodes.
    ///
    /// Also returns actions that report how the share is enforced.
    pub(super) fn response(
        &self,
        uid: &PodUid,
        request: &ContainerRequest,
        state: &NodeState,
        resource: Resource,
        ids: &BTreeSet<String>,
    ) -> Result<(Allocation, Vec<Action>), CallError> {
        let pod = self.pod(uid)?;
        let enforcement = self.enforcement(uid, request)?;
        let gpus = check_devices(self.gpus, request, resource, ids)?;
        self.check_gpus(request, state, gpus)?;
        self.check_selected(uid, request, gpus)?;
        if resource == Resource::VcudaMemory {
            // The answer for the container's compute carries everything. The kubelet would log a
            // conflict if it received the same again.
            return Ok((Allocation::default(), Vec::new()));
        }
        let container = &request.claim.container;
        let grant = ContainerGrant {
            container: container.clone(),
            role: request.claim.role,
            holds: self.gpus.node.holds(request.claim.request, gpus),
        };
        let recipient = GrantedContainer {
            dialect: request.claim.dialect,
            grant: &grant,
            memory_units: memory_units(pod, container),
            priority: priority(pod, container),
        };
        let cgpu_disabled = self.node_labels.is_some_and(disables_cgpu);
        let injection = InjectionSettings { cgpu_disabled, ..self.settings.injection.clone() };
        let mut given = injection.response(&recipient, &self.gpus.node, self.gpus.ids.unit());
        enforcement.add_to(&mut given, &format!("{}/{uid}/{container}", self.settings.grants));
        let allow_opt_out = self.settings.isolation.allow_opt_out;
        Ok((given, enforcement_notices(&enforcement, allow_opt_out, uid, pod, container)))
    }

    fn pod(&self, uid: &PodUid) -> Result<&Pod, CallError> {
        self.pods.get(uid).ok_or_else(|| CallError::PodGone(uid.clone()))
    }

    /// Chooses the GPUs of a container for `count` devices of a resource: the granted ones if they fit, else by the
    /// policy and the annotations of the pod.
    fn choose_gpus(
        &self,
        uid: &PodUid,
        request: &ContainerRequest,
        state: &NodeState,
        (resource, count): (Resource, usize),
        offered: &OfferedDevices,
    ) -> Result<GpuSet, CallError> {
        let has_room = |gpu: GpuIndex| state.fits(gpu, self.gpus.node.hold(request.claim.request, gpu));
        let is_usable = |gpu: GpuIndex| {
            let per_gpu = request.per_gpu(resource, count);
            has_room(gpu) && per_gpu.is_none_or(|devices| offered.has(gpu, devices))
        };
        let (granted, required) = (request.granted, offered.required().union(request.partly_fixed));
        if granted.len() == request.gpu_count()
            && granted.is_superset(required)
            && granted.iter().all(is_usable)
        {
            return Ok(granted);
        }
        // A share of one GPU has all its devices there, so a required device determines the GPU.
        let is_allowed = |gpu: GpuIndex| {
            let is_determined = matches!(request.claim.request, Request::Share(Share { count: 1, .. }));
            let is_there = !is_determined || required.is_empty() || required.contains(gpu);
            is_there && !self.cordoned.contains(gpu)
        };
        let all = state.node().topology().gpus();
        let open = close(state, all.iter().filter(|gpu| !is_usable(*gpu) || !is_allowed(*gpu)));
        let GpuWishes { selection, gpu_policy, .. } = self.wishes(uid)?;
        let pod = PodRequest { selection, ..PodRequest::of_mains([request.claim.request]) };
        let policy = self.settings.policy.clone().with(gpu_policy, None);
        let placement = place(&open, &pod, &policy, required).map_err(|refusal| {
            let (pod_name, container) = (request.pod_name.clone(), request.claim.container.clone());
            // The granted GPUs have room, but the kubelet does not know yet that their devices are offered again.
            if granted.len() == request.gpu_count() && granted.iter().all(has_room) {
                return CallError::TooFewDevices { pod: pod_name, container, count, resource, gpus: granted };
            }
            CallError::DoesNotFit {
                pod: pod_name,
                container,
                // The reason on the real node is more useful than one about closed GPUs.
                refusal: place(state, &pod, &policy, required).err().unwrap_or(refusal),
                node: self.settings.node.clone(),
            }
        })?;
        Ok(placement.gpus.into_iter().next().unwrap_or_default())
    }

    /// Verifies that the GPUs are healthy and have room for the container.
    fn check_gpus(
        &self,
        request: &ContainerRequest,
        state: &NodeState,
        gpus: GpuSet,
    ) -> Result<(), CallError> {
        for index in gpus.iter() {
            let gpu = self.gpus.node.gpu(index).ok_or(CallError::UnknownGpu(index))?;
            let (pod, container) = (request.pod_name.clone(), request.claim.container.clone());
            if let Some(problem) = gpu.health.problem() {
                return Err(CallError::Unhealthy { pod, container, gpu: index, problem });
            }
            if !state.fits(index, self.gpus.node.hold(request.claim.request, index)) {
                return Err(CallError::GpuIsFull { pod, container, gpu: index });
            }
        }
        Ok(())
    }

    /// Verifies that the pod's annotations allow GPUs that the scheduler has not granted.
    fn check_selected(
        &self,
        uid: &PodUid,
        request: &ContainerRequest,
        gpus: GpuSet,
    ) -> Result<(), CallError> {
        if gpus == request.granted {
            return Ok(());
        }
        let selection = self.wishes(uid)?.selection;
        let mut chosen = self.gpus.node.gpus().iter().filter(|gpu| gpus.contains(gpu.index));
        match chosen.find(|gpu| !selection.accepts(gpu)) {
            None => Ok(()),
            Some(gpu) => {
                let (pod, container) = (request.pod_name.clone(), request.claim.container.clone());
                Err(CallError::NotSelected { pod, container, gpu: gpu.index })
            }
        }
    }

    /// Returns which GPUs a pod wants by its annotations.
    fn wishes(&self, uid: &PodUid) -> Result<GpuWishes, CallError> {
        Ok(gpu_wishes::parse(&self.pod(uid)?.metadata.annotations)?)
    }

    fn enforcement(&self, uid: &PodUid, request: &ContainerRequest) -> Result<Enforcement, CallError> {
        let pod = self.pod(uid)?;
        let hold = Hold::of(request.claim.request, MiB::ZERO);
        if hold != Hold::Whole {
            vcuda::ceiling(&pod.metadata.annotations)?;
        }
        let isolation = &self.settings.isolation;
        isolation
            .enforcement(hold, &pod.metadata.annotations, self.node_labels)
            .map_err(|reason| CallError::NotEnforceable { pod: request.pod_name.clone(), reason })
    }
}

/// Returns actions that report to the pod's owner if a share is enforced other than requested.
fn enforcement_notices(
    enforcement: &Enforcement,
    allow_opt_out: bool,
    uid: &PodUid,
    pod: &Pod,
    container: &str,
) -> Vec<Action> {
    let (warning, reason, message) = match enforcement {
        Enforcement::None(NotEnforced::NoLibrary(why)) => (
            Warning::new("a container is not held to its share of the GPU").error(why),
            "ShareNotEnforced",
            format!("container {container} is not held to its share of the GPU: {why}"),
        ),
        Enforcement::ByLibrary(_) if asks_to_opt_out(&pod.metadata.annotations) && !allow_opt_out => (
            Warning::new("a pod asks to opt out of its share, which this node does not allow"),
            "OptOutNotAllowed",
            format!(
                "container {container} is held to its share of the GPU: this node does not allow {OPT_OUT}"
            ),
        ),
        _ => return Vec::new(),
    };
    let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
    vec![
        Action::Warn(warning.pod(pod).container(container)),
        Action::RecordPodEvent { uid: uid.clone(), namespace, name, reason, message },
    ]
}

/// Returns the units of `aliyun.com/gpu-mem` of a container, and of all containers that run at
/// once.
fn memory_units(pod: &Pod, container: &str) -> (u64, u64) {
    let units = |c: &Container| Resource::GpuMemory.asked_by(c) as u64;
    let all = || pod.spec.containers_with_roles();
    let own = all().find(|(c, _)| c.name == container).map_or(0, |(c, _)| units(c));
    (own, all().filter(|(_, role)| *role != ContainerRole::Init).map(|(c, _)| units(c)).sum())
}

/// Returns the priority that a container names in HAMi's dialect.
fn priority(pod: &Pod, container: &str) -> Option<u64> {
    let (container, _) = pod.spec.containers_with_roles().find(|(c, _)| c.name == container)?;
    let amount = container.resources.limits.get(hami::PRIORITY);
    amount.or_else(|| container.resources.requests.get(hami::PRIORITY))?.0.parse().ok()
}

/// Returns the state of the node with some GPUs fully booked.
fn close(state: &NodeState, closed: impl Iterator<Item = GpuIndex>) -> NodeState {
    let mut state = state.clone();
    let container = ContainerGrant {
        container: String::new(),
        role: ContainerRole::Main,
        holds: closed.map(|gpu| (gpu, Hold::Whole)).collect(),
    };
    state.add(&PodGrant {
        pod: PodUid(String::new()),
        node: state.node().name.clone(),
        cpu: MilliCpu::ZERO,
        memory: MiB::ZERO,
        containers: vec![container],
    });
    state
}
