//! Flags of gpu-manager and gpushare's device plugin, as their manifests pass them.
//!
//! They may have `_` for `-` and one dash for two, and some have no effect here. Flags with the
//! same meaning as one of ours are aliases of it.

use std::ffi::OsString;

/// Accepted flags without effect: the name, whether its value is a separate word, and the reason.
const WITHOUT_EFFECT: &[(&str, bool, &str)] = &[
    ("allocation-check-period", true, "allocations are compared at every change"),
    ("alsologtostderr", false, "logs go to standard error"),
    ("cgroup-driver", true, "it is detected"),
    ("checkpoint-path", true, "the kubelet's podresources API is used"),
    ("client-cert", true, "the kubelet is reached through its sockets"),
    ("client-key", true, "the kubelet is reached through its sockets"),
    ("container-runtime-endpoint", true, "the container runtime is not called"),
    ("docker-endpoint", true, "the container runtime is not called"),
    ("incluster-mode", false, "it is detected"),
    ("kubelet-address", true, "the kubelet is reached through its sockets"),
    ("kubelet-port", true, "the kubelet is reached through its sockets"),
    ("log-backtrace-at", true, "--log sets what is logged"),
    ("log-dir", true, "logs go to standard error"),
    ("logtostderr", false, "logs go to standard error"),
    ("mps", false, "it never had an effect"),
    ("query-kubelet", false, "the kubelet is reached through its sockets"),
    ("runtime-request-timeout", true, "the container runtime is not called"),
    ("share-mode", false, "shares are always served"),
    ("standalone", false, "the API server is required"),
    ("stderrthreshold", true, "--log sets what is logged"),
    ("timeout", true, "the kubelet is reached through its sockets"),
    ("token", true, "the kubelet is reached through its sockets"),
    ("v", true, "--log sets what is logged"),
    ("vmodule", true, "--log sets what is logged"),
    ("wait-timeout", true, "the container runtime is not called"),
];

/// Flags with another name now.
const RENAMED: &[(&str, &str)] = &[("sample-period", "sample-every")];

/// Hidden flag that collects the flags without effect.
const COLLECTED: &str = "--no-effect";

/// Translates a command line to the current flags.
pub(crate) fn translate(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words = words.into_iter();
    let mut translated: Vec<OsString> = words.by_ref().take(2).collect();
    if translated.get(1).is_none_or(|command| command != "agent") {
        translated.extend(words);
        return translated;
    }
    while let Some(word) = words.next() {
        let Some(flag) = word.to_str().and_then(Flag::read) else {
            translated.push(word);
            continue;
        };
        let known = WITHOUT_EFFECT.iter().find(|(name, ..)| *name == flag.name);
        match known {
            Some((name, takes_value, _)) => {
                if *takes_value && flag.value.is_none() {
                    words.next();
                }
                translated.push(format!("{COLLECTED}={name}").into());
            }
            None => translated.push(flag.print().into()),
        }
    }
    translated
}

/// Returns the reason why a flag has no effect, for the log.
pub(crate) fn why(name: &str) -> &'static str {
    WITHOUT_EFFECT.iter().find(|(known, ..)| *known == name).map_or("it is unknown", |(.., why)| why)
}

#[derive(Debug)]
struct Flag<'a> {
    name: String,
    value: Option<&'a str>,
}

impl<'a> Flag<'a> {
    /// Parses `--name` and `--name=value`, also with one dash. Single letters that are not an old
    /// flag are left alone.
    fn read(word: &'a str) -> Option<Self> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let bare = name.strip_prefix("--").or_else(|| name.strip_prefix('-'))?;
        let is_ours = !name.starts_with("--") && bare.len() == 1 && bare != "v";
        let name = bare.replace('_', "-");
        let renamed = RENAMED.iter().find(|(old, _)| *old == name);
        let name = renamed.map_or(name, |(_, new)| (*new).to_owned());
        (!bare.is_empty() && !is_ours).then_some(Self { name, value })
    }

    fn print(&self) -> String {
        match self.value {
            Some(value) => format!("--{}={value}", self.name),
            None => format!("--{}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: &str) {
        let words = format!("tessera {line}");
        let translated = translate(words.split(' ').map(OsString::from));
        let joined: Vec<&str> = translated.iter().skip(1).filter_map(|word| word.to_str()).collect();
        assert_eq!(joined.join(" "), expected);
    }

    #[test]
    fn translates_the_flags_of_the_original_manifests() {
        check("agent --sample_period=1", "agent --sample-every=1");
        check(
            "agent --share-mode=true --query-addr=0.0.0.0 --extra-config=/etc/gpu-manager/extra-config.json --hostname-override=n --log-dir=/var/log --v=5",
            "agent --no-effect=share-mode --query-addr=0.0.0.0 --extra-config=/etc/gpu-manager/extra-config.json --hostname-override=n --no-effect=log-dir --no-effect=v",
        );
        check(
            "agent -logtostderr --v 5 --memory-unit=MiB",
            "agent --no-effect=logtostderr --no-effect=v --memory-unit=MiB",
        );
        check(
            "agent --node_labels a_b=c_d --virtual_manager_path=/x_y",
            "agent --node-labels a_b=c_d --virtual-manager-path=/x_y",
        );
        check(
            "agent -mps -query-kubelet --token abc --health-check",
            "agent --no-effect=mps --no-effect=query-kubelet --no-effect=token --health-check",
        );
    }

    #[test]
    fn leaves_everything_else_unchanged() {
        check("agent -h", "agent -h");
        check("agent --gpus simulated:a_b -- --v", "agent --gpus simulated:a_b -- --no-effect=v");
        check("place --v_x 5", "place --v_x 5");
        check("agent", "agent");
    }
}
