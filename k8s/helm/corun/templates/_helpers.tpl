{{/* Names and labels. Roles are router, prefill, decode, colocated and gateway. */}}

{{- define "corun.image" -}}
{{- with .root.Values.images.registry }}{{ . }}/{{ end }}{{ get .root.Values.images .name }}
{{- end }}

{{/* The labels of a role: those of a pool's roles name the pool. */}}
{{- define "corun.labels" -}}
app.kubernetes.io/name: corun
app.kubernetes.io/component: {{ .role }}
{{- if ne .role "gateway" }}
corun.dev/pool: {{ .root.Values.pool }}
{{- end }}
{{- end }}

{{- define "corun.name" -}}
corun-{{ .role }}{{ if ne .role "gateway" }}-{{ .root.Values.pool }}{{ end }}
{{- end }}

{{- define "corun.configName" -}}
corun-config-{{ .Values.pool }}-{{ .Values.clusterToml | sha256sum | trunc 10 }}
{{- end }}

{{- define "corun.port" -}}
{{ get (dict "router" 50051 "prefill" 50061 "decode" 50071 "colocated" 50091) . }}
{{- end }}

{{/* The roles of nodes that the pool has. */}}
{{- define "corun.nodes" -}}
{{- range list "prefill" "decode" "colocated" }}{{ if (get $.Values .).enabled }}{{ . }} {{ end }}{{ end }}
{{- end }}

{{/* What every container is: without rights, on a root that it cannot write to. */}}
{{- define "corun.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "corun.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.user }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Hosts and zones are shared out. */}}
{{- define "corun.spread" -}}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- topologyKey: {{ . }}
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "corun.labels" $ | nindent 6 }}
{{- end }}
{{- end }}

{{/* Two Services lead to all pods of a role, ready or not. */}}
{{- define "corun.headless" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}-{{ .root.Values.pool }}
  labels:
    {{- include "corun.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "corun.labels" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ include "corun.port" .role }}, targetPort: grpc}
{{- end }}

{{- define "corun.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "corun.name" . }}
  labels:
    {{- include "corun.labels" . | nindent 4 }}
spec:
  {{- if has .role (list "router" "gateway") }}
  minAvailable: 1
  {{- else }}
  maxUnavailable: 1
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "corun.labels" . | nindent 6 }}
{{- end }}

{{/* Scaling by CPU, or of prefill nodes by the time that a prompt would wait. */}}
{{- define "corun.scaler" -}}
{{- $own := get .root.Values .role }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "corun.name" . }}
  labels:
    {{- include "corun.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "corun.name" . }}}
  minReplicas: {{ $own.autoscaling.minReplicas }}
  maxReplicas: {{ $own.autoscaling.maxReplicas }}
  metrics:
    {{- if eq .role "prefill" }}
    - type: Pods
      pods:
        metric: {name: corun_prefill_expected_wait_seconds}
        target: {type: AverageValue, averageValue: "1"}
    {{- else }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: 60}
    {{- end }}
  behavior:
    {{- if eq .role "prefill" }}
    scaleUp: # A new node serves only after minutes of loading: what is asked for meanwhile is not missing.
      stabilizationWindowSeconds: 60
      policies: [{type: Pods, value: 1, periodSeconds: 180}]
    {{- end }}
    scaleDown:
      stabilizationWindowSeconds: 900
      policies: [{type: Pods, value: 1, periodSeconds: 300}]
{{- end }}

{{/* The container that fetches the model of model.fetch into /models. */}}
{{- define "corun.fetch" -}}
name: fetch
image: {{ include "corun.image" (dict "root" . "name" "router") }}
command: [hf, download]
args:
  - {{ .Values.model.fetch.repository }}
  - --revision={{ .Values.model.fetch.revision }}
  - --local-dir=/models/{{ .Values.model.fetch.directory }}
env:
  - {name: HF_HOME, value: /models/.hub}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: corun-hub-token, key: token, optional: true}}
resources:
  requests: {cpu: 500m, memory: 512Mi}
  limits: {memory: 4Gi}
securityContext:
  {{- include "corun.confined" . | nindent 2 }}
volumeMounts:
  - {name: model, mountPath: /models}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* HTTPS to public addresses. */}}
{{- define "corun.toHub" -}}
policyTypes: [Egress]
egress:
  - to:
      - ipBlock:
          cidr: 0.0.0.0/0
          except: [10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16]
      - ipBlock:
          cidr: "::/0"
          except: ["fc00::/7", "fe80::/10"]
    ports:
      - {protocol: TCP, port: 443}
{{- end }}
