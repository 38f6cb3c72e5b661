{{/*
Names and labels. Most templates here take (dict "root" $ "role" ROLE), ROLE being proxy, prompt or completion.
*/}}

{{/* At most 40 characters that a Service may have as its name. Where the release's name had to be changed, a hash of it
tells "a.b" from "a-b". A release whose name has "tandem" in it keeps it, but for an end of "-tandem", which is what "x"
would become. */}}
{{- define "tandem.fullname" -}}
{{- $isWhole := and (contains "tandem" .Release.Name) (not (hasSuffix "-tandem" .Release.Name)) -}}
{{- $wanted := .Values.fullnameOverride | default ($isWhole | ternary .Release.Name (printf "%s-tandem" .Release.Name)) -}}
{{- $name := $wanted | lower | replace "." "-" -}}
{{- if regexMatch "^[^a-z]" $name }}{{ $name = printf "r%s" $name }}{{ end -}}
{{- if or (ne $name $wanted) (gt (len $name) 40) -}}
{{- printf "%s-%s" ($name | trunc 31 | trimSuffix "-") ($wanted | sha256sum | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{- define "tandem.name" -}}
{{ include "tandem.fullname" .root }}-{{ .role }}
{{- end }}

{{/* These never change in a chart's life: a Deployment's selector cannot be changed. */}}
{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "tandem-%s" .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The head of every manifest of a role. */}}
{{- define "tandem.metadata" -}}
name: {{ include "tandem.name" . }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{- $account := (index .root.Values .role).serviceAccount -}}
{{- $account.name | default ($account.create | ternary (include "tandem.name" .) "default") -}}
{{- end }}

{{- define "tandem.image" -}}
{{- $image := index .root.Values.images (eq .role "proxy" | ternary "proxy" "engine") -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "tandem.pullPolicy" -}}
{{ index .root.Values.images (eq .role "proxy" | ternary "proxy" "engine") "pullPolicy" }}
{{- end }}

{{- define "tandem.port" -}}
{{ index (dict "proxy" 8000 "prompt" 7001 "completion" 7002) .role }}
{{- end }}

{{/* Something else than the chart decides how many pods there are. */}}
{{- define "tandem.isScaled" -}}
{{- $scaling := (index .root.Values .role).autoscaling -}}
{{- if or $scaling.hpa.enabled $scaling.keda.enabled }}true{{ end -}}
{{- end }}
