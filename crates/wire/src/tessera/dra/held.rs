//! What claims hold or wait for, and whether other GPUs may take the place of those that were allocated.

use std::collections::BTreeMap;

use tessera_core::claim::{ClaimPart, Exchange};
use tessera_core::node::Node;
use tessera_core::request::Request;

use super::selectors::cannot_tell_apart;
use super::{BadAllocation, CLASS, DRIVER, claim_holds, gpu_request};
use crate::foreign::dialect::{Dialect, DialectSet};
use crate::foreign::dra::{DeviceClass, DeviceRequest, RequestedDevices, ResourceClaim};

/// Value of `allocationMode` for every device that matches.
const ALL: &str = "All";

/// The reason why the GPUs of a claim may not be replaced by others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fixed {
    /// Another pod, or another kind of object, uses the claim.
    #[error("another pod uses the claim")]
    Shared,
    /// A device of another driver belongs to the claim.
    #[error("driver {0} has a part in the claim")]
    OtherDriver(String),
    /// A request takes all devices, or administrative access.
    #[error("request {0} does not name a number of GPUs")]
    Mode(String),
    /// The class of a request is unknown.
    #[error("class {0} is not known")]
    Class(String),
    /// A selector may tell GPUs of one kind apart.
    #[error("a selector of request {0} may tell the GPUs apart")]
    Selector(String),
    /// A constraint names an attribute in which GPUs of one kind may differ.
    #[error("the constraint on {0} may tell the GPUs apart")]
    Constraint(String),
    /// The allocation lacks its time, without which kube-scheduler rejects it.
    #[error("the allocation has no allocationTimestamp")]
    Timestamp,
}

/// Returns what a claim holds of the GPUs of `node` by each of its requests. Administrative access holds nothing.
///
/// # Errors
/// Fails if the allocation names devices or amounts that the node does not have.
pub fn claim_parts(claim: &ResourceClaim, node: &Node) -> Result<Vec<ClaimPart>, BadAllocation> {
    let mut parts: Vec<ClaimPart> = Vec::new();
    for held in claim_holds(claim, node)? {
        let Some(hold) = held.hold else { continue };
        // A request whose GPUs differ in size holds different amounts of them.
        match parts.iter_mut().find(|part| part.request == held.request && part.hold == hold) {
            Some(part) if !part.gpus.contains(&held.gpu) => part.gpus.push(held.gpu),
            _ => parts.push(ClaimPart { request: held.request, gpus: vec![held.gpu], hold }),
        }
    }
    Ok(parts)
}

/// Returns whether a class has only devices of ours.
fn is_own_class(class: &DeviceClass) -> bool {
    let only_ours = format!("device.driver==\"{DRIVER}\"");
    let mut expressions = class.spec.selectors.iter().filter_map(|selector| selector.cel.as_ref());
    expressions.any(|cel| {
        let plain: String = cel.expression.chars().filter(|c| !c.is_whitespace()).collect();
        plain.replace('\'', "\"") == only_ours
    })
}

/// Returns the dialects of whole GPUs that these classes serve by claims, without a device plugin.
pub fn served_dialects<'a>(classes: impl IntoIterator<Item = &'a DeviceClass>) -> DialectSet {
    let served = classes.into_iter().filter(|class| is_own_class(class));
    let names = served.filter_map(|class| class.spec.extended_resource_name.as_deref());
    let dialect = |name: &str| match name {
        "nvidia.com/gpu" => Some(Dialect::Nvidia),
        "aliyun.com/gpu" => Some(Dialect::Gputopology),
        _ => None,
    };
    names.filter_map(dialect).fold(DialectSet::default(), DialectSet::with)
}

/// Returns the GPUs that a claim without an allocation needs at least. Requests that cannot be told with certainty, such
/// as alternatives and other classes, are left out, so a node without room for the rest cannot serve the claim.
#[must_use]
pub fn waiting_requests(claim: &ResourceClaim, classes: &BTreeMap<String, DeviceClass>) -> Vec<Request> {
    let is_ours = |name: &str| classes.get(name).map_or(name == CLASS, is_own_class);
    let needed = |request: &DeviceRequest| {
        let exact = request.exactly.as_ref().filter(|exact| !exact.admin_access)?;
        let devices = &exact.devices;
        if devices.allocation_mode == ALL || !is_ours(&devices.device_class_name) {
            return None;
        }
        gpu_request(devices).ok()
    };
    claim.spec.devices.requests.iter().filter_map(needed).collect()
}

/// Returns whether a claim has GPUs of ours, or asks for them.
#[must_use]
pub fn names_gpus(claim: &ResourceClaim, classes: &BTreeMap<String, DeviceClass>) -> bool {
    let is_ours = |devices: &RequestedDevices| {
        let class = &devices.device_class_name;
        classes.get(class).map_or(class == CLASS, is_own_class)
    };
    let names = |request: &DeviceRequest| {
        let exact = request.exactly.iter().map(|exact| &exact.devices);
        exact.chain(request.first_available.iter().map(|sub| &sub.devices)).any(is_ours)
    };
    claim.results(DRIVER).next().is_some() || claim.spec.devices.requests.iter().any(names)
}

/// Returns whether any GPUs with enough room satisfy a claim: its requests name only amounts and numbers of GPUs of our
/// classes.
#[must_use]
pub fn is_plain(claim: &ResourceClaim, classes: &BTreeMap<String, DeviceClass>) -> bool {
    let is_plain = |request: &DeviceRequest| {
        request.exactly.as_ref().is_some_and(|exact| {
            let devices = &exact.devices;
            !exact.admin_access
                && devices.selectors.is_empty()
                && devices.allocation_mode != ALL
                && gpu_request(devices).is_ok()
                && classes.get(&devices.device_class_name).is_some_and(has_only_own_selector)
        })
    };
    let devices = &claim.spec.devices;
    !devices.requests.is_empty() && devices.constraints.is_empty() && devices.requests.iter().all(is_plain)
}

fn has_only_own_selector(class: &DeviceClass) -> bool {
    is_own_class(class) && class.spec.selectors.len() == 1
}

/// Returns the freedom to replace the GPUs of a claim for this pod.
///
/// # Errors
/// Fails with the reason if the GPUs must stay.
pub fn exchange(
    claim: &ResourceClaim,
    pod_uid: &str,
    classes: &BTreeMap<String, DeviceClass>,
) -> Result<Exchange, Fixed> {
    let status = &claim.status;
    if status.reserved_for.len() != 1 || !claim.is_reserved_for(pod_uid) {
        return Err(Fixed::Shared);
    }
    let Some(allocation) = &status.allocation else { return Ok(Exchange::None) };
    if allocation.allocation_timestamp.is_none() {
        return Err(Fixed::Timestamp);
    }
    let drivers = allocation.devices.results.iter().map(|result| &result.driver);
    let drivers = drivers.chain(status.devices.iter().map(|device| &device.driver));
    if let Some(other) = drivers.into_iter().find(|driver| *driver != DRIVER) {
        return Err(Fixed::OtherDriver(other.clone()));
    }
    for result in &allocation.devices.results {
        let name = || result.request.clone();
        let found = claim.spec.devices.requests.iter().find(|request| request.name == result.main_request());
        let devices = found.and_then(|request| requested(request, &result.request));
        let devices = devices.filter(|devices| devices.allocation_mode != ALL && !result.admin_access);
        let devices = devices.ok_or_else(|| Fixed::Mode(name()))?;
        let class = classes.get(&devices.device_class_name);
        let class = class.ok_or_else(|| Fixed::Class(devices.device_class_name.clone()))?;
        let selectors = class.spec.selectors.iter().chain(&devices.selectors);
        let mut expressions = selectors.map(|selector| selector.cel.as_ref());
        if !expressions.all(|cel| cel.is_some_and(|cel| cannot_tell_apart(&cel.expression))) {
            return Err(Fixed::Selector(name()));
        }
    }
    let mut distinct = false;
    for constraint in &claim.spec.devices.constraints {
        let own = |attribute: &Option<String>, names: &[&str]| {
            let name = attribute.as_deref().and_then(|name| name.strip_prefix(DRIVER)?.strip_prefix('/'));
            name.is_some_and(|name| names.contains(&name))
        };
        // GPUs of one kind have one product and architecture; each has a UUID of its own.
        if own(&constraint.distinct_attribute, &["uuid", "index"]) {
            distinct = true;
        } else if !own(&constraint.match_attribute, &["productName", "architecture"]) {
            let names = [&constraint.match_attribute, &constraint.distinct_attribute];
            let name = names.into_iter().flatten().next().cloned().unwrap_or_default();
            return Err(Fixed::Constraint(name));
        }
    }
    Ok(Exchange::SameKind { distinct })
}

/// Returns the devices that a request asks for, where `name` is `request` or `request/alternative`.
fn requested<'a>(request: &'a DeviceRequest, name: &str) -> Option<&'a RequestedDevices> {
    if let Some(exact) = &request.exactly {
        return Some(&exact.devices);
    }
    let (_, alternative) = name.split_once('/')?;
    request.first_available.iter().find(|sub| sub.name == alternative).map(|sub| &sub.devices)
}
