//! Which devices a container shall take, and whether it may have those it was given.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{
    gpu::Health,
    gpu_set::GpuSet,
    grant::{ContainerGrant, Hold, PodGrant},
    node::NodeState,
    placement::place,
    request::{ContainerRole, PodRequest, Request},
    units::{GpuIndex, MiB, MilliCpu, PodUid},
};
use tessera_node::device_plugin::{Allocation, PreferenceRequest};
use tessera_wire::{
    foreign::{objects::Pod, pod_spec::Claim},
    kubelet::{
        container_response::{GrantedContainer, InjectionSettings, disables_cgpu},
        device_id::Resource,
    },
};

use super::{
    Action, Agent, NodeGpus,
    isolation::{Enforcement, NotEnforced, OPT_OUT, asks_to_opt_out},
};

/// One question about one container.
struct Ask {
    claim: Claim,
    pod_name: String,
    /// The GPUs, where another resource of the same container has fixed them.
    fixed: Option<GpuSet>,
    /// Some of the GPUs, where that other resource could not name them all.
    among: GpuSet,
    /// GPUs the scheduler granted.
    granted: GpuSet,
}

impl Ask {
    fn cards(&self) -> usize {
        match self.claim.request {
            Request::Whole(count) => usize::from(count),
            Request::Share { .. } | Request::Memory(_) => 1,
        }
    }

    /// Devices of a resource wanted on each GPU; `None` where only the sum counts.
    fn per_gpu(&self, resource: Resource, count: usize) -> Option<usize> {
        match (resource, self.claim.request) {
            (Resource::VcudaMemory, Request::Whole(_)) => None,
            _ => Some(count / self.cards().max(1)),
        }
    }
}

impl Agent {
    fn ask(&self, uid: &PodUid, container: &str, resource: Resource) -> Result<Ask, String> {
        let cards = self.cards.as_ref().ok_or_else(|| "this node's GPUs are not known yet".to_owned())?;
        let pod = self.pods.get(uid).ok_or_else(|| format!("pod {uid} is gone"))?;
        let claims = pod.spec.claims(cards.ids.unit()).map_err(|error| error.to_string())?;
        let claim = claims.into_iter().find(|claim| claim.container == container);
        let claim = claim.ok_or_else(|| format!("container {container} asks for no GPU"))?;
        let others = Resource::of(claim.dialect).filter(|other| *other != resource);
        let given = others.filter_map(|other| Some((other, self.admission.recorded(uid, container, other)?)));
        let named: Option<GpuSet> =
            given.map(|(other, ids)| cards.of_ids(other, ids).into_iter().collect()).next();
        let granted = self.annotated(pod).iter().find(|granted| granted.container == container);
        let granted = granted.map(ContainerGrant::gpus).unwrap_or_default();
        let pod_name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
        let mut ask = Ask { claim, pod_name, fixed: None, among: GpuSet::EMPTY, granted };
        match named {
            // A few blocks of memory beside whole GPUs need not lie on each of them.
            Some(named) if named.len() < ask.cards() => ask.among = named,
            named => ask.fixed = named,
        }
        Ok(ask)
    }

    /// The devices a container shall take.
    pub(super) fn steer(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        wish: &PreferenceRequest,
    ) -> Result<Vec<String>, String> {
        let ask = self.ask(uid, container, resource)?;
        let state =
            self.beside(uid, container, ask.claim.role).ok_or_else(|| format!("pod {uid} is gone"))?;
        let cards = self.cards.as_ref().ok_or_else(|| "this node's GPUs are not known yet".to_owned())?;
        self.held(uid, &ask)?;
        let offer = Offer::of(cards, resource, wish)?;
        let gpus = match ask.fixed {
            Some(fixed) => fixed,
            None => self.choose(&ask, &state, resource, wish.count, &offer)?,
        };
        offer.pick(gpus, wish.count, ask.per_gpu(resource, wish.count)).ok_or_else(|| {
            format!(
                "pod {}: the kubelet has not {} free {resource} left on GPU {gpus}, where container {container} belongs",
                ask.pod_name, wish.count
            )
        })
    }

    /// The GPUs: as granted if that is possible, else by our own policy.
    fn choose(
        &self,
        ask: &Ask,
        state: &NodeState,
        resource: Resource,
        count: usize,
        offer: &Offer,
    ) -> Result<GpuSet, String> {
        let hold = Hold::of(ask.claim.request);
        let serves = |gpu: GpuIndex| {
            state.fits(gpu, hold) && ask.per_gpu(resource, count).is_none_or(|units| offer.has(gpu, units))
        };
        let (granted, required) = (ask.granted, offer.required.union(ask.among));
        if granted.len() == ask.cards() && granted.is_superset(required) && granted.iter().all(serves) {
            return Ok(granted);
        }
        // A share is on one GPU, so what is required names it.
        let part_of_required = |gpu: GpuIndex| {
            matches!(ask.claim.request, Request::Whole(_)) || required.is_empty() || required.contains(gpu)
        };
        let closed =
            state.node().topology().gpus().iter().filter(|gpu| !serves(*gpu) || !part_of_required(*gpu));
        let open = close(state, closed);
        let request = PodRequest::of_mains([ask.claim.request]);
        let placement = place(&open, &request, &self.settings.policy, required).map_err(|refusal| {
            let refusal = place(state, &request, &self.settings.policy, required).err().unwrap_or(refusal);
            format!(
                "pod {}, container {}: {refusal} on node {}",
                ask.pod_name, ask.claim.container, self.settings.node
            )
        })?;
        Ok(placement.gpus.into_iter().next().unwrap_or_default())
    }

    /// What a container gets with these devices, if it may have them.
    pub(super) fn hand_over(
        &mut self,
        uid: &PodUid,
        container: &str,
        resource: Resource,
        ids: &BTreeSet<String>,
    ) -> Result<Allocation, String> {
        let ask = self.ask(uid, container, resource)?;
        let state =
            self.beside(uid, container, ask.claim.role).ok_or_else(|| format!("pod {uid} is gone"))?;
        let cards = self.cards.as_ref().ok_or_else(|| "this node's GPUs are not known yet".to_owned())?;
        let pod = self.pods.get(uid).ok_or_else(|| format!("pod {uid} is gone"))?;
        let held = self.held(uid, &ask)?;
        let gpus = check_devices(cards, &ask, resource, ids)?;
        let hold = Hold::of(ask.claim.request);
        for gpu in gpus.iter() {
            let card = cards.node.gpu(gpu).ok_or_else(|| format!("there is no GPU {gpu}"))?;
            let whose = || format!("pod {}, container {container}", ask.pod_name);
            if card.health == Health::Unhealthy {
                return Err(format!("{}: GPU {gpu} is unhealthy", whose()));
            }
            if !state.fits(gpu, hold) {
                return Err(format!(
                    "{}: the kubelet offers GPU {gpu}, of which others hold too much",
                    whose()
                ));
            }
        }
        if resource == Resource::VcudaMemory {
            // What comes with the GPU comes with its compute: the kubelet would only complain of hearing it twice.
            return Ok(Allocation::default());
        }
        let grant = ContainerGrant {
            container: container.to_owned(),
            role: ask.claim.role,
            holds: gpus.iter().map(|gpu| (gpu, hold)).collect(),
        };
        let recipient = GrantedContainer {
            dialect: ask.claim.dialect,
            grant: &grant,
            memory_units: memory_units(pod, container),
        };
        let labels = self.published.node.as_ref().map(|node| &node.metadata.labels);
        let hand_over = InjectionSettings {
            cgpu_disabled: labels.is_some_and(disables_cgpu),
            ..self.settings.hand_over.clone()
        };
        let mut given = hand_over.response(&recipient, &cards.node, cards.ids.unit());
        held.add_to(&mut given, &format!("{}/{uid}/{container}", self.settings.grants));
        let notes = notes(&held, self.settings.isolation.allow_opt_out, uid, pod, container);
        self.notes.extend(notes);
        Ok(given)
    }

    /// What holds the container to its share.
    fn held(&self, uid: &PodUid, ask: &Ask) -> Result<Enforcement, String> {
        let pod = self.pods.get(uid).ok_or_else(|| format!("pod {uid} is gone"))?;
        let labels = self.published.node.as_ref().map(|node| &node.metadata.labels);
        let hold = Hold::of(ask.claim.request);
        let held = self.settings.isolation.of(hold, &pod.metadata.annotations, labels);
        held.map_err(|reason| format!("pod {}: {reason}", ask.pod_name))
    }
}

/// What the owner of a container should know of how it is held.
fn notes(held: &Enforcement, allow_opt_out: bool, uid: &PodUid, pod: &Pod, container: &str) -> Vec<Action> {
    let (reason, message) = match held {
        Enforcement::None(NotEnforced::NoLibrary(why)) => {
            ("ShareNotEnforced", format!("container {container} is not held to its share of the GPU: {why}"))
        }
        Enforcement::ByLibrary(_) if asks_to_opt_out(&pod.metadata.annotations) && !allow_opt_out => (
            "OptOutNotAllowed",
            format!(
                "container {container} is held to its share of the GPU: this node does not allow {OPT_OUT}"
            ),
        ),
        _ => return Vec::new(),
    };
    let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
    vec![
        Action::Warn(format!("{namespace}/{name}: {message}")),
        Action::RecordPodEvent { uid: uid.clone(), namespace, name, reason, message },
    ]
}

/// Units of `aliyun.com/gpu-mem` of the container, and of all containers that stand beside each other.
fn memory_units(pod: &Pod, container: &str) -> (u64, u64) {
    let units = |c: &tessera_wire::foreign::objects::Container| Resource::GpuMemory.asked_by(c) as u64;
    let all = || pod.spec.containers_with_roles();
    let own = all().find(|(c, _)| c.name == container).map_or(0, |(c, _)| units(c));
    (own, all().filter(|(_, role)| *role != ContainerRole::Init).map(|(c, _)| units(c)).sum())
}

/// The node with some GPUs closed to everybody.
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

/// The GPUs of these devices, if they make what was asked for.
fn check_devices(
    cards: &NodeGpus,
    ask: &Ask,
    resource: Resource,
    ids: &BTreeSet<String>,
) -> Result<GpuSet, String> {
    let mut on_gpu: BTreeMap<GpuIndex, usize> = BTreeMap::new();
    for id in ids {
        let (gpu, _) =
            cards.ids.read(resource, id).ok_or_else(|| format!("this node has no {resource} {id}"))?;
        *on_gpu.entry(gpu).or_default() += 1;
    }
    let gpus: GpuSet = on_gpu.keys().copied().collect();
    let complain = |what: String| {
        Err(format!(
            "pod {}, container {}: the kubelet chose {resource} of GPU {gpus}, {what}; \
             ask for the same in init containers and in those after them, or for nothing in init containers",
            ask.pod_name, ask.claim.container
        ))
    };
    match (ask.fixed, ask.per_gpu(resource, ids.len())) {
        (Some(fixed), _) if !fixed.is_superset(gpus) => {
            return complain(format!("but the rest of GPU {fixed}"));
        }
        (None, None) if gpus.len() > ask.cards() => {
            return complain(format!("which are more than {} GPUs", ask.cards()));
        }
        (_, Some(units)) if gpus.len() != ask.cards() || on_gpu.values().any(|count| *count != units) => {
            return complain(format!("which do not make {} GPU(s)", ask.cards()));
        }
        _ => {}
    }
    if !gpus.is_superset(ask.among) && resource != Resource::VcudaMemory {
        return complain(format!("but memory of GPU {}", ask.among));
    }
    Ok(ask.fixed.unwrap_or(gpus))
}

/// What the kubelet lets us choose from.
struct Offer {
    /// By GPU, by number on the GPU; required ones first.
    on_gpu: BTreeMap<GpuIndex, Vec<(bool, u64, String)>>,
    /// GPUs of devices that are already decided.
    required: GpuSet,
}

impl Offer {
    fn of(cards: &NodeGpus, resource: Resource, wish: &PreferenceRequest) -> Result<Self, String> {
        let required: BTreeSet<&String> = wish.required.iter().collect();
        let mut offer = Self { on_gpu: BTreeMap::new(), required: GpuSet::EMPTY };
        let all: BTreeSet<&String> = wish.available.iter().chain(&wish.required).collect();
        for id in all {
            let known = cards.ids.read(resource, id);
            let (gpu, number) = known.ok_or_else(|| format!("this node has no {resource} {id}"))?;
            let decided = required.contains(id);
            if decided {
                offer.required = offer.required.with(gpu);
            }
            offer.on_gpu.entry(gpu).or_default().push((!decided, number, id.clone()));
        }
        offer.on_gpu.values_mut().for_each(|devices| devices.sort_unstable());
        Ok(offer)
    }

    fn has(&self, gpu: GpuIndex, units: usize) -> bool {
        self.on_gpu.get(&gpu).is_some_and(|devices| devices.len() >= units)
    }

    /// Devices of these GPUs: so many on each, or so many in all. All that are required must be among them.
    fn pick(&self, gpus: GpuSet, count: usize, per_gpu: Option<usize>) -> Option<Vec<String>> {
        let of = |gpu: GpuIndex| self.on_gpu.get(&gpu).into_iter().flatten();
        let mut picked: Vec<&(bool, u64, String)> = match per_gpu {
            Some(units) => gpus.iter().flat_map(|gpu| of(gpu).take(units)).collect(),
            None => gpus.iter().flat_map(of).collect(),
        };
        picked.sort_by_key(|(optional, ..)| *optional);
        picked.truncate(count);
        let required = self.on_gpu.values().flatten().filter(|(optional, ..)| !optional).count();
        let included = picked.iter().filter(|(optional, ..)| !optional).count();
        (picked.len() == count && included == required)
            .then(|| picked.into_iter().map(|(.., id)| id.clone()).collect())
    }
}
