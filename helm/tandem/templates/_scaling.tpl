{{/* What each role is scaled by: a list of {metric, target}; metrics without a target are left out. */}}
{{- define "tandem.signals" -}}
{{- $targets := (index .root.Values .role).autoscaling.targets -}}
{{- $metrics := dict -}}
{{- if eq .role "prompt" -}}
{{- $metrics = dict "queuedPromptTokens" "tandem_engine_queued_prompt_tokens" "firstTokenSeconds" "tandem_engine_predicted_first_token_seconds" -}}
{{- else if eq .role "completion" -}}
{{- $metrics = dict "kvUse" "tandem_engine_kv_use" "sequenceUse" "tandem_engine_sequence_use" "interTokenSeconds" "tandem_engine_inter_token_p90_seconds" -}}
{{- else -}}
{{- $metrics = dict "openRequests" "tandem_proxy_open_requests" -}}
{{- end -}}
{{- $signals := list -}}
{{- range $name, $metric := $metrics -}}
{{- if not (kindIs "invalid" (index $targets $name)) -}}
{{- $signals = append $signals (dict "metric" $metric "target" (include "tandem.settingText" (index $targets $name))) -}}
{{- end -}}
{{- end -}}
{{ toJson $signals }}
{{- end }}

{{- define "tandem.needsSignal" -}}
{{- fail (printf "%s.autoscaling: no target is set; see %s.autoscaling.targets" .role .role) -}}
{{- end }}
