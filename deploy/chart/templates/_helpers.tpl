{{/* The image of the agent and the scheduler. */}}
{{- define "tessera.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Where the certificates of the verbs come from: secrets, existing or none. */}}
{{- define "tessera.tls" -}}
{{- if and (eq .Values.scheduler.mode "second") (eq .Values.scheduler.pagesAccess "open") }}none{{ else }}{{ .Values.tls.source }}{{ end -}}
{{- end }}

{{/* True if Prometheus needs a token. */}}
{{- define "tessera.reader" -}}
{{- if eq .Values.monitoring.scrape "podMonitor" }}true{{ end -}}
{{- end }}

{{/* The version of kube-scheduler: that of the cluster, without the suffix of its distribution. */}}
{{- define "tessera.kubeSchedulerTag" -}}
{{- $version := semver .Capabilities.KubeVersion.Version -}}
{{- .Values.scheduler.kubeScheduler.tag | default (printf "v%d.%d.%d" $version.Major $version.Minor $version.Patch) -}}
{{- end }}

{{- define "tessera.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The file of --quota-config. */}}
{{- define "tessera.quotas" -}}
{{- with .Values.scheduler.quotas -}}
{{ dict "QuotaConfigMapName" .configMap "QuotaConfigMapNamespace" "kube-system" "GPUModelLabel" .modelLabel "GPUPoolLabel" .poolLabel | toJson }}
{{- end -}}
{{- end }}

{{/* The resources of the dialects that the agents serve, as a list of CEL. */}}
{{- define "tessera.resources" -}}
{{- $names := dict "nvidia" "'nvidia.com/gpu'" "gputopology" "'aliyun.com/gpu'" "gpushare" "'aliyun.com/gpu-mem'" "vcuda" "'tencent.com/vcuda-core', 'tencent.com/vcuda-memory'" "hami" "'nvidia.com/gpu', 'nvidia.com/gpumem', 'nvidia.com/gpumem-percentage', 'nvidia.com/gpucores'" -}}
{{- $all := list -}}
{{- range .Values.agent.dialects }}{{ $all = append $all (get $names .) }}{{ end -}}
[{{ join ", " $all }}]
{{- end }}

{{/* What sets schedulerName of pods that request GPUs: policy, webhook, or nothing. */}}
{{- define "tessera.setsSchedulerName" -}}
{{- $second := and .Values.scheduler.enabled (eq .Values.scheduler.mode "second") -}}
{{- $auto := semverCompare ">=1.36-0" .Capabilities.KubeVersion.Version | ternary "policy" "webhook" -}}
{{- if and $second .Values.scheduler.setSchedulerName -}}
{{- if and (eq .Values.scheduler.schedulerNameBy "policy") (eq $auto "webhook") -}}
{{- fail (printf "scheduler.schedulerNameBy=policy needs Kubernetes 1.36 or newer, and this cluster has %s: write auto or webhook" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- eq .Values.scheduler.schedulerNameBy "auto" | ternary $auto .Values.scheduler.schedulerNameBy -}}
{{- end -}}
{{- end }}

{{/* Which pods get schedulerName: those without the label that opts out. */}}
{{- define "tessera.schedulerNameSelectors" -}}
namespaceSelector:
  matchExpressions: [{ key: tessera.dev/scheduler, operator: NotIn, values: [default] }]
objectSelector:
  matchExpressions: [{ key: tessera.dev/scheduler, operator: NotIn, values: [default] }]
{{- end }}

{{/* Of these, the pods that request GPUs of Tessera and name no scheduler. With scheduler.dra also pods with claims, whose
device classes the API server does not see here. */}}
{{- define "tessera.schedulerNameConditions" -}}
- name: names-no-scheduler
  expression: object.spec.?schedulerName.orValue('default-scheduler') == 'default-scheduler' && object.spec.?nodeName.orValue('') == ''
- name: requests-gpus
  expression: >-
    (object.spec.containers + object.spec.?initContainers.orValue([]))
    .map(c, c.?resources.?limits.orValue(c.?resources.?requests.orValue({})))
    .exists(l, {{ include "tessera.resources" . }}.exists(r, r in l && string(l[r]) != '0'))
    {{- if .Values.scheduler.dra }}
    || object.spec.?resourceClaims.orValue([]).size() > 0
    {{- end }}
{{- end }}
